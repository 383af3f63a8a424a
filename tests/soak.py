"""A soak: random decode steps against float64, with poison wherever nothing may be read.

    python -m tests.soak --steps 2000 --seed 0                     # on a GPU
    python -m tests.soak --steps 60 --device cpu                   # under Triton's interpreter
    compute-sanitizer --tool memcheck python -m tests.soak --sanitize

Each step runs twice, with scratch full of NaN and full of 1e30, and must give the same bits. The
exit status is 1 if a step differs from float64 by more than its bound, see `bound`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusion_pass import launch, reference
from fusion_pass.ops import gated_decode_attention
from tests.soak_steps import (
    INF,
    INTERPRETED,
    ON_GPU,
    SANITIZED,
    Geometry,
    Sizes,
    Step,
    draw_geometry,
    make_step,
)

STEPS_PER_COMPILED = 8
SHARE_COMPILED = 0.1
POISONS = (float("nan"), 1e30)
OPTIONS = {
    "fusion_pass.devices": ("cuda", "cpu"),
    "fusion_pass.policy": "always",
    "fusion_pass.strict": True,
    "fx_graph_cache": False,
}
Function = Callable[[Step], Tensor]


@dataclass(frozen=True)
class Part:
    """What one process does: every `of`-th geometry, beginning with number `index`."""

    seed: int
    geometries: int
    steps_each: int
    compiled: int
    index: int
    of: int
    device: str
    home: str
    sizes: Sizes
    deadline: float


@dataclass
class Outcome:
    """What became of the steps; a mismatch is a line that names its geometry and step."""

    steps: int = 0
    compiled: int = 0
    mismatches: list[str] = field(default_factory=list)
    declined: Counter[str] = field(default_factory=Counter)

    def add(self, other: Outcome) -> None:
        self.steps += other.steps
        self.compiled += other.compiled
        self.mismatches += other.mismatches
        self.declined += other.declined


def stock(geometry: Geometry, step: Step, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
    """What torch's own attention and gate give on the clean operands, rounded as torch rounds."""
    query, key, value, gate = step.clean
    batch, heads, tokens, _ = query.shape
    bias = mask
    if mask is not None and mask.dtype != torch.bool:
        bias = mask.to(query.dtype)
    if sinks is not None:
        # One more key that scores 0 and has the value 0, with the sink as its bias.
        key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
        rows = torch.zeros(batch, heads, tokens, key.shape[2] - 1, device=key.device)
        if bias is not None:
            rows = rows.masked_fill(~bias, -INF) if bias.dtype == torch.bool else rows + bias
        share = sinks.to(rows.dtype)[None, :, None, None].expand(batch, heads, tokens, 1)
        bias = torch.cat([rows, share], dim=-1).to(query.dtype)
    wide = [x.repeat_interleave(geometry.group, dim=1) for x in (key, value)]
    with sdpa_kernel([SDPBackend.MATH]):
        output = F.scaled_dot_product_attention(query, *wide, attn_mask=bias)
    return (output.transpose(1, 2).float() * gate.float().sigmoid()).to(query.dtype)


def bound(geometry: Geometry, step: Step, truth: Tensor, naive: Tensor) -> float:
    """How far from float64 a step may be, from the error of stock torch on the same operands.

    To 1.5 times stock's largest error comes what a step owes at any luck: half a unit for each
    rounding of the attention, of the product and, by the contract "eager", of the sigmoid; and sums
    in float32 in another order, from weights that carry twice the precision of V.
    """
    value = step.clean[2]
    rows = step.live_rows.transpose(1, 2)  # [B, Q, Hq]
    errors = (naive.double() - truth)[rows]
    stocks = float(errors.abs().max()) if errors.numel() else 0.0
    eps = torch.finfo(value.dtype).eps
    sigmoid = torch.finfo(geometry.gate_dtype).eps if geometry.numerics == "eager" else 0.0
    precision = max(torch.finfo(torch.float32).eps, eps**2)
    finite = truth[truth.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return 1.5 * stocks + (eps + sigmoid / 2) * largest + 4 * precision * float(value.abs().max())


def judge(geometry: Geometry, step: Step, found: Tensor) -> str | None:
    """What is wrong with the result of a step, or None."""
    home = step.clean[0].device
    mask, sinks = (None if x is None else x.to(home) for x in (step.mask, step.sinks))
    truth = reference.gated_decode_attention(
        *step.clean, mask, sinks, **geometry.modes, compute_dtype=torch.float64
    )
    found = found.to(home)
    if (found.shape, found.dtype) != (truth.shape, step.clean[0].dtype):
        return f"{found.dtype} {tuple(found.shape)} instead of {tuple(truth.shape)}"
    if not torch.equal(found.isfinite(), truth.isfinite()):
        return f"{int((found.isfinite() != truth.isfinite()).sum())} elements are not finite"
    finite = truth.isfinite()
    error = float((found.double() - truth)[finite].abs().max()) if finite.any() else 0.0
    most = bound(geometry, step, truth, stock(geometry, step, mask, sinks))
    return None if error <= most else f"error {error:.3g}, bound {most:.3g}"


@contextmanager
def poisoned_scratch() -> Iterator[Callable[[float], None]]:
    """Scratch full of the value that the function given is called with."""
    original, poison = launch.allocate_scratch, [POISONS[0]]

    def allocate(size: tuple[int, ...], device: torch.device) -> Tensor:
        return torch.full(size, poison[0], dtype=torch.float32, device=device)

    def fill(value: float) -> None:
        poison[0] = value

    launch.allocate_scratch = allocate
    try:
        yield fill
    finally:
        launch.allocate_scratch = original


def by_operator(geometry: Geometry) -> Function:
    """The eager operator."""

    def call(step: Step) -> Tensor:
        return gated_decode_attention(*step.poisoned, step.mask, step.sinks, **geometry.modes)

    return call


def by_compiler(geometry: Geometry) -> Function:
    """Attention and gate as a model writes them, compiled."""

    def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, mask: Tensor) -> Tensor:
        wide = [
            x[:, :, None].expand(-1, -1, geometry.group, -1, -1).flatten(1, 2) for x in (key, value)
        ]
        output = F.scaled_dot_product_attention(query, *wide, attn_mask=mask)
        return output.transpose(1, 2) * torch.sigmoid(gate)

    torch._dynamo.reset()
    options = OPTIONS | {"fusion_pass.numerics": geometry.numerics}
    compiled = torch.compile(model, backend="fusion_pass", options=options)
    return lambda step: compiled(*step.poisoned, step.mask)


def compilable(geometry: Geometry) -> Geometry:
    """The geometry without what a model that uses SDPA cannot say, and with one length."""
    dtype = geometry.dtype
    return replace(
        geometry,
        sinks=False,
        dead_row=False,
        fill=-INF,
        gate_dtype=dtype,
        bias_dtype=dtype,
        ragged=False,
    )


def soak_geometry(part: Part, number: int, compiled: bool, outcome: Outcome) -> None:
    """Run the steps of one geometry, which its number and the seed determine."""
    geometry = draw_geometry(Random(f"{part.seed} {number} {compiled}"), part.sizes)
    if compiled:
        geometry = compilable(geometry)
    call = by_compiler(geometry) if compiled else by_operator(geometry)
    home, device = torch.device(part.home), torch.device(part.device)
    no_cache = torch._functorch.config.patch(enable_autograd_cache=False)
    with poisoned_scratch() as fill, torch.no_grad(), no_cache:
        for index in range(STEPS_PER_COMPILED if compiled else part.steps_each):
            if time.time() > part.deadline:
                return
            seed = Random(f"{part.seed} {number} {index}").getrandbits(31)
            step = make_step(geometry, seed, home, device)
            results = []
            for poison in POISONS:
                fill(poison)
                results.append(call(step))
            if compiled and (reason := _refusal()):
                outcome.declined[reason] += 1
                return
            problem = judge(geometry, step, results[0])
            if problem is None and not torch.equal(*[x.nan_to_num(7.0) for x in results]):
                problem = "two runs with other values in the scratch differ"
            outcome.steps += 1
            outcome.compiled += compiled
            if problem is not None:
                way = "compiled" if compiled else "operator"
                outcome.mismatches.append(f"{way} {number}, step {index}: {problem}; {geometry}")


def _refusal() -> str | None:
    """Why the attention that was compiled last was not fused."""
    told = torch._dynamo.utils.counters["fusion_pass"]
    return None if told["fused"] else ", ".join(told) or "no attention was found"


def soak(part: Part) -> Outcome:
    """Run one process's part."""
    outcome = Outcome()
    for compiled, count in ((False, part.geometries), (True, part.compiled)):
        for number in range(part.index, count, part.of):
            torch._dynamo.utils.counters.clear()
            soak_geometry(part, number, compiled, outcome)
    return outcome


def soak_in_processes(part: Part) -> Outcome:
    """Run a whole soak in `part.of` processes: kernels compile side by side."""
    if part.of == 1:
        return soak(part)
    outcome, context = Outcome(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(part.of, mp_context=context) as pool:
        for done in pool.map(soak, [replace(part, index=index) for index in range(part.of)]):
            outcome.add(done)
    return outcome


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--steps", type=int, help="2000 by default, 60 to sanitize")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which to stop")
    parser.add_argument("--workers", type=int, help="processes; by default what the machine has")
    parser.add_argument("--sanitize", action="store_true", help="few, small steps in one process")
    options = parser.parse_args(arguments)
    options.steps = options.steps or (60 if options.sanitize else 2000)
    return options


def plan(options: argparse.Namespace, begin: float) -> Part:
    """How many geometries and processes the command line amounts to."""
    few = options.sanitize or options.device == "cpu"
    compiled = 0 if options.sanitize else round(options.steps * SHARE_COMPILED / STEPS_PER_COMPILED)
    eager = options.steps - compiled * STEPS_PER_COMPILED
    # On a GPU a geometry costs the compilation of two kernels.
    steps_each = 2 if options.device == "cpu" else 4 if options.sanitize else 14
    sizes = INTERPRETED if options.device == "cpu" else SANITIZED if options.sanitize else ON_GPU
    return Part(
        seed=options.seed,
        geometries=-(-eager // steps_each),
        steps_each=steps_each,
        compiled=compiled,
        index=0,
        of=options.workers or (1 if few else max(1, min(12, (os.cpu_count() or 1) - 2))),
        device=options.device,
        # Under a sanitizer the GPU runs nothing but the kernels.
        home="cpu" if few else options.device,
        sizes=sizes,
        deadline=begin + options.budget,
    )


def main(arguments: list[str]) -> int:
    """Soak, print what came of it, and return the exit status."""
    options, begin = parse(arguments), time.time()
    if options.device == "cpu":
        # Before triton is imported, which reads it then.
        os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    outcome = soak_in_processes(plan(options, begin))
    for mismatch in outcome.mismatches:
        print(mismatch)
    for reason, count in sorted(outcome.declined.items()):
        print(f"compiled but not fused, so not compared: {reason} x{count}")
    print(
        f"{outcome.steps} steps ({outcome.compiled} of them compiled), seed {options.seed}, "
        f"{options.device}: {len(outcome.mismatches)} mismatches in {time.time() - begin:.0f} s"
    )
    return 1 if outcome.mismatches else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
