"""The demo: a small gated-attention decoder decodes with the pass off and on, and is compared."""

from __future__ import annotations

import copy
import glob
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

from fusion_pass import inductor
from fusion_pass.demo_model import Decoder, Sizes
from fusion_pass.launch import INTERPRETED_WITH, interpretable

CPU_SIZES = Sizes(
    batch=2,
    layers=2,
    hidden=64,
    query_heads=4,
    kv_heads=2,
    head_dim=32,
    capacity=64,
    vocabulary=128,
)
GPU_SIZES = Sizes(
    batch=8,
    layers=4,
    hidden=1024,
    query_heads=16,
    kv_heads=2,
    head_dim=256,
    capacity=8192,
    vocabulary=1024,
)

MAX_STEPS = CPU_SIZES.capacity

Step = Callable[[Tensor, Tensor], Tensor]

_CALL = re.compile(
    r" : \[num_users=\d+\] = call_function\[target=(?:torch\.ops\.)?(?P<target>\S+)\]"
    r"\(args = \((?P<args>.*?),?\), kwargs = \{(?P<kwargs>.*)\}\)$"
)


class ToolchainError(RuntimeError):
    """Inductor has no compiler to compile with; the message says what to install."""


@dataclass(frozen=True)
class Decoded:
    """The tokens that a model was fed, (B, steps), and its logits after each, (B, steps, V)."""

    tokens: Tensor
    logits: Tensor

    def error(self, exact: Decoded) -> float:
        """The largest difference between the logits and the exact ones."""
        return (self.logits.double() - exact.logits).abs().max().item()


def run(steps: int) -> bool:
    """Decodes up to MAX_STEPS tokens off and on and compares; whether all of it holds.

    Raises:
        ToolchainError: Inductor has no compiler on this machine.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = GPU_SIZES if device == "cuda" else CPU_SIZES
    torch.manual_seed(0)
    # Triton's interpreter cannot compute in bfloat16.
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    model = Decoder(sizes).to(device=device, dtype=dtype).eval()
    print(f"Decoding {steps} tokens in {dtype} with {sizes}\n")

    # A graph from a warm cache would never reach the pass.
    options: dict[str, Any] = {"fx_graph_cache": False, "triton.cudagraphs": device == "cuda"}
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        stock, stock_time = _compile_and_decode(model, steps, None, "inductor", options)
        options |= {"fusion_pass.devices": (device,), "fusion_pass.dump": folder}
        fused, fused_time = _compile_and_decode(model, steps, stock.tokens, "fusion_pass", options)
        counts = dict(counters["fusion_pass"])
        sites = counts.get("fused", 0)
        if sites:
            print(_excerpt(folder))
        wide = copy.deepcopy(model).double()
        exact = decode(wide, wide, steps, stock.tokens)

    print(f"{sites} of {sizes.layers} gated attentions fused")
    print(_what_ran(dtype) if sites else f"The pass changed nothing: {counts or 'it is off'}")
    if device == "cuda":
        print(
            f"Step in a CUDA graph with {sizes.capacity} live tokens: "
            f"stock {stock_time:.3f} ms, fused {fused_time:.3f} ms"
        )
    return _compare(stock, fused, exact) and sites == sizes.layers


def decode(step: Step, model: Decoder, steps: int, tokens: Tensor | None = None) -> Decoded:
    """Runs `step`, some form of `model`, from an empty cache, on `tokens` or greedily."""
    model.forget()
    batch, device = model.sizes.batch, model.head.weight.device
    token = torch.zeros(batch, dtype=torch.int64, device=device)
    fed: list[Tensor] = []
    logits: list[Tensor] = []
    for index in range(steps):
        if tokens is not None:
            token = tokens[:, index]
        fed.append(token)
        # A CUDA graph writes the next step's logits over these.
        logits.append(step(token, torch.tensor([index], device=device)).clone())
        token = logits[-1].argmax(dim=-1)
    return Decoded(torch.stack(fed, dim=1), torch.stack(logits, dim=1))


def _compile_and_decode(
    model: Decoder, steps: int, tokens: Tensor | None, backend: str, options: dict[str, Any]
) -> tuple[Decoded, float]:
    """What the compiled model decodes, and its milliseconds a step (0.0 without a GPU).

    Raises:
        ToolchainError: there is no C++ compiler, or none that finds Python's headers.
    """
    torch._dynamo.reset()
    counters.clear()
    step: Step = torch.compile(model, backend=backend, options=dict(options), fullgraph=True)
    try:
        decoded = decode(step, model, steps, tokens)
    except inductor.CompilationFailed as fault:
        if (lack := inductor.lack_of_compiler(fault)) is None:
            raise
        raise ToolchainError(f"Inductor cannot compile on this machine: {lack}") from fault
    if not decoded.tokens.is_cuda:
        return decoded, 0.0
    last = torch.tensor([model.sizes.capacity - 1], device="cuda")
    return decoded, _step_time(step, decoded.tokens[:, 0], last)


def _step_time(step: Step, token: Tensor, position: Tensor, repeats: int = 50) -> float:
    """The median milliseconds of `repeats` steps on the GPU."""
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step(token, position)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _compare(stock: Decoded, fused: Decoded, exact: Decoded) -> bool:
    """Prints both errors; whether the fused step is as right as the stock step.

    Both errors are the largest of the same number of equal roundings, so that one is seldom twice
    the other unless something is wrong.
    """
    stock_error, fused_error = stock.error(exact), fused.error(exact)
    print(f"Largest difference from float64: stock {stock_error:.3g}, fused {fused_error:.3g}")
    agreeing = (fused.logits.argmax(dim=-1) == stock.logits.argmax(dim=-1)).double().mean().item()
    print(f"Next tokens that agree with stock: {agreeing:.1%}")
    return fused_error <= 2 * stock_error


def _what_ran(dtype: torch.dtype) -> str:
    if torch.cuda.is_available():
        return f"The Triton kernels ran on {torch.cuda.get_device_name()}."
    if interpretable(dtype):
        return "No GPU: the Triton kernels were interpreted on the CPU (TRITON_INTERPRET=1)."
    missing = " ".join(name for name in INTERPRETED_WITH if find_spec(name) is None)
    first = f"after pip install {missing}, " if missing else ""
    return (
        "No GPU: the op ran as its torch reference on the CPU, and no Triton kernel ran "
        f"({first}TRITON_INTERPRET=1 interprets the kernels)."
    )


def _excerpt(folder: str) -> str:
    """The first match in the graph before the pass, and what stands there after it."""
    before = _read_nodes(folder, "before")
    after = _read_nodes(folder, "after")
    replaced = _up_to("aten.mul", (node for node in before if node not in after))
    replacing = _up_to("gated_decode_attention", (node for node in after if node not in before))
    return "\n".join(["First match before:", *replaced, "After:", *replacing, ""])


def _read_nodes(folder: str, state: str) -> list[str]:
    """The nodes of the dumped graph that was rewritten, one a line, without their user counts."""
    (path,) = glob.glob(os.path.join(folder, f"*.{state}.txt"))
    with open(path, encoding="utf-8") as file:
        return [_CALL.sub(_spell_call, line) for line in file.read().splitlines()]


def _spell_call(call: re.Match[str]) -> str:
    arguments = ", ".join(part for part in (call["args"], call["kwargs"]) if part)
    return f" = {call['target']}({arguments})"


def _up_to(target: str, nodes: Iterator[str]) -> Iterator[str]:
    """The nodes up to and with the first one that calls `target`."""
    for node in nodes:
        yield node
        if target in node:
            return
