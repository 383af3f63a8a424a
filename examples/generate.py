"""transformers' generate with the fusion: two arguments more, and the model unmodified.

On a GPU: a Qwen3.5 with random weights, in bfloat16. On a CPU, which pass and transformers must be
asked for: a tiny one in float32.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch._dynamo.utils import counters

if find_spec("transformers") is None:
    raise SystemExit("this example needs transformers: pip install -e '.[test]'")

on_gpu = torch.cuda.is_available()
os.environ.setdefault("FUSION_PASS_DEVICES", "cuda" if on_gpu else "cpu")

from transformers import CompileConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig  # noqa: E402

LAYERS = 4 if on_gpu else 1
NEW_TOKENS = 32 if on_gpu else 6


def build() -> Qwen3_5ForCausalLM:
    """A model whose layers are all gated attention. Yours would come from `from_pretrained`."""
    config = Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=1024 if on_gpu else 64,
        intermediate_size=2048 if on_gpu else 128,
        num_hidden_layers=LAYERS,
        num_attention_heads=16 if on_gpu else 4,
        num_key_value_heads=2,
        head_dim=256 if on_gpu else 32,
        layer_types=["full_attention"] * LAYERS,
    )
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(config).eval()
    return model.to("cuda", torch.bfloat16) if on_gpu else model


def main() -> None:
    model = build()
    prompt = torch.randint(0, 512, (2, 20), device=model.device)
    settings = {
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    eager = model.generate(prompt, **settings)

    config = CompileConfig(backend="fusion_pass", mode="reduce-overhead")
    # transformers compiles on GPUs alone, unless told otherwise.
    config._compile_all_devices = not on_gpu
    fused = model.generate(prompt, cache_implementation="static", compile_config=config, **settings)

    print("counters:", dict(counters["fusion_pass"]))
    assert counters["fusion_pass"]["fused"] >= LAYERS
    agreeing = (fused.sequences == eager.sequences).float().mean().item()
    # The first logits are the prefill's, which is not compiled; the second are the first step's.
    error = (fused.logits[1] - eager.logits[1]).norm() / eager.logits[1].norm()
    print(f"logits differ by {error:.1e} of their norm, {agreeing:.0%} of tokens agree")
    assert error < (3e-2 if on_gpu else 1e-5)


if __name__ == "__main__":
    # What comes from Inductor's cache is not counted.
    torch.compiler.config.force_disable_caches = True
    main()
