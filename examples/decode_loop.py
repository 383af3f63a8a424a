"""A decode loop by hand: the step compiled once, replayed as a CUDA graph on a GPU.

The model is the small decoder of `python -m fusion_pass demo`, which keeps its K/V cache in
buffers. The prompt is fed token by token; a prefill of its own would be compiled apart.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._dynamo.utils import counters

import fusion_pass
from fusion_pass.demo_model import Decoder, Sizes

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"

if on_gpu:
    sizes = Sizes(8, 4, 1024, 16, 2, 256, capacity=4096, vocabulary=1024)
else:
    sizes = Sizes(2, 1, 64, 4, 2, 32, capacity=64, vocabulary=128)

Step = Callable[[Tensor, Tensor], Tensor]


def decode(step: Step, model: Decoder, prompt: Tensor, steps: int) -> Tensor:
    """The logits (B, steps, V) after the prompt (B, T), each token chosen by the ones before."""
    model.forget()
    seen: list[Tensor] = []
    for index in range(prompt.shape[1] + steps - 1):
        is_prompt = index < prompt.shape[1]
        token = prompt[:, index].contiguous() if is_prompt else seen[-1].argmax(dim=-1)
        # A tensor: the position is data of the captured graph, not a part of it.
        logits = step(token, torch.tensor([index], device=device))
        if index + 1 >= prompt.shape[1]:
            # A replay writes the next step's logits into the same memory.
            seen.append(logits.clone())
    return torch.stack(seen, dim=1)


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    model = Decoder(sizes).to(device, torch.bfloat16 if on_gpu else torch.float32).eval()
    prompt = torch.randint(0, sizes.vocabulary, (sizes.batch, 5), device=device)

    stock = decode(model, model, prompt, steps=8)
    with fusion_pass.enable(devices=(device,)):
        # The mode is what records a CUDA graph; on a CPU it changes nothing.
        step: Step = torch.compile(model, mode="reduce-overhead")
        fused = decode(step, model, prompt, steps=8)

    print("counters:", dict(counters["fusion_pass"]))
    assert counters["fusion_pass"]["fused"] == sizes.layers
    agreeing = (fused.argmax(-1) == stock.argmax(-1)).float().mean().item()
    error = (fused[:, 0] - stock[:, 0]).norm() / stock[:, 0].norm()
    print(f"first logits differ by {error:.1e} of their norm, {agreeing:.0%} of tokens agree")
    assert error < (3e-2 if on_gpu else 1e-5)


if __name__ == "__main__":
    # What comes from Inductor's cache is not counted.
    torch.compiler.config.force_disable_caches = True
    main()
