"""Producer x K/V x mask x gate x chain, every pair of them in some row: each fuses and agrees.

Every row runs twice: its graph as CUDA would have it, on fake tensors, and its graph on the CPU,
which is executed before and after.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.graphs import attend, fake_mode, merge_heads, repeat_kv, run_pass, trace, where_mask

B, H, KV, S, D = 3, 6, 2, 20, 16
TIMES = H // KV

Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]


def matmul_softmax(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    logits = torch.matmul(query, key.transpose(2, 3)) * 0.25
    weights = torch.softmax(logits if mask is None else logits + mask, dim=-1)
    return torch.matmul(weights, value)


def fused(producer: str) -> Attend:
    def call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # The CPU has one fused producer; the others differ in name alone.
        on_cpu = query.device.type == "cpu"
        return attend("cpu-flash" if on_cpu else producer, query, key, value, mask)

    return call


PRODUCERS: dict[str, Attend] = {
    "cudnn": fused("cudnn"),
    "flash": fused("flash"),
    "efficient": fused("efficient"),
    "spelled out": matmul_softmax,
}
KEY_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "repeat_kv": lambda cache: repeat_kv(cache, TIMES),
    "repeat_interleave": lambda cache: cache.repeat_interleave(TIMES, dim=1),
    "token major": lambda cache: repeat_kv(cache.transpose(1, 2).clone().transpose(1, 2), TIMES),
    "sliced": lambda cache: repeat_kv(torch.cat([cache, cache], 2).narrow(2, 0, S), TIMES),
    "grown": lambda cache: repeat_kv(
        torch.cat([cache.narrow(2, 0, S - 1), cache.narrow(2, S - 1, 1)], 2), TIMES
    ),
    "written": lambda cache: repeat_kv(
        cache.index_copy(2, torch.full((1,), 3, device=cache.device), cache.narrow(2, 5, 1)), TIMES
    ),
}
MASKS: dict[str, Callable[[Tensor, torch.dtype], Tensor | None]] = {
    "none": lambda keep, dtype: None,
    "boolean": lambda keep, dtype: where_mask(keep, dtype),
    "filled": lambda keep, dtype: where_mask(keep, dtype, -65536.0),
    "inverted": lambda keep, dtype: where_mask(keep.logical_not(), dtype),
    "one row": lambda keep, dtype: where_mask(keep.narrow(0, 0, 1), dtype),
    "expanded": lambda keep, dtype: where_mask(keep.expand(B, H, 1, S), dtype),
    "float": lambda keep, dtype: keep.to(dtype) * 2.0 - 1.0,
}
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda gate: torch.sigmoid(gate.narrow(-1, 0, H * D)),
    "chunk": lambda gate: torch.sigmoid(gate.view(B, 1, H, 2 * D).chunk(2, -1)[1].flatten(2)),
    "sigmoid, then views": lambda gate: (
        torch.sigmoid(gate.narrow(-1, 0, H * D)).view(B, 1, H, D).reshape(B, 1, H * D)
    ),
    "one a head": lambda gate: (
        torch.sigmoid(gate.narrow(-1, 0, H)).unsqueeze(-1).expand(B, 1, H, D).reshape(B, 1, -1)
    ),
    "one a token": lambda gate: torch.sigmoid(gate.narrow(-1, 0, 1)),
    "spelled out": lambda gate: 1.0 / (1.0 + torch.exp(-gate.narrow(-1, 0, H * D))),
}
CHAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "reshape": merge_heads,
    "contiguous": lambda output: output.transpose(1, 2).contiguous().view(B, 1, -1),
    "flatten": lambda output: output.permute(0, 2, 1, 3).flatten(2),
    "squeeze": lambda output: output.squeeze(2).reshape(B, H * D).unsqueeze(1),
    "detour": lambda output: output.reshape(B, H, D).view(B, H, 4, 4).flatten(1).unsqueeze(1),
}
COLUMNS = (PRODUCERS, KEY_VALUES, MASKS, GATES, CHAINS)

Row = tuple[str, ...]


def pairwise() -> list[Row]:
    """Rows in which every two values of different columns meet, chosen greedily."""
    names = [list(column) for column in COLUMNS]
    possible = [
        row for row in itertools.product(*names) if row[:1] != ("flash",) or row[2] == "none"
    ]
    wanted = {pair for row in possible for pair in _pairs(row)}
    rows: list[Row] = []
    while wanted:
        best = max(possible, key=lambda row: len(wanted & _pairs(row)))
        rows.append(best)
        wanted -= _pairs(best)
    return rows


def _pairs(row: Row) -> set[tuple[tuple[int, str], ...]]:
    return set(itertools.combinations(enumerate(row), 2))


def program(row: Row) -> Callable[..., Tensor]:
    producer, key_value, mask, gate, chain = (
        column[name]
        for column, name in zip(COLUMNS, row, strict=True)  # type: ignore[index]
    )

    def model(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, gates: Tensor) -> Tensor:
        output = producer(query, key_value(key), key_value(value), mask(keep, query.dtype))
        return chain(output) * gate(gates)

    return model


def tensors(device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    def empty(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    return (
        empty(B, H, 1, D),
        empty(B, KV, S, D),
        empty(B, KV, S, D),
        torch.empty(B, 1, 1, S, dtype=torch.bool, device=device),
        empty(B, 1, H * 2 * D),
    )


ROWS = pairwise()


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_fires_on_a_cuda_graph(row: Row) -> None:
    with fake_mode():
        module = trace(program(row), *tensors("cuda", torch.bfloat16))
    assert run_pass(module) == 1


@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_numbers_on_the_cpu(row: Row) -> None:
    mode = fake_mode()
    sizes = tensors("cpu", torch.float32)
    module = trace(program(row), *[mode.from_tensor(x) for x in sizes])
    generator = torch.Generator().manual_seed(1)
    query, key, value, gate = (
        torch.randn(sizes[i].shape, generator=generator) for i in (0, 1, 2, 4)
    )
    keep = torch.rand(sizes[3].shape, generator=generator) < 0.5
    args = (query, key, value, keep, gate)
    expected = module(*args)
    exact = program(row)(*[x.double() if x.is_floating_point() else x for x in args])
    assert run_pass(module, devices=("cpu",)) == 1
    found = module(*args)
    assert found.shape == expected.shape
    assert math.isfinite(found.sum())
    assert (found - exact).norm() <= 2 * (expected - exact).norm() + 1e-7 * exact.norm()
