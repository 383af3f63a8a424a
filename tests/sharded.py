"""Gated attention layers as tensor parallelism and FSDP leave them, for the ranks of one group."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

HIDDEN, HEAD_DIM, LENGTH, BATCH = 64, 16, 40, 2
CPU_AND_GPU = {
    "fusion_pass.devices": ("cpu", "cuda"),
    "fusion_pass.policy": "always",
    "fusion_pass.strict": True,
}


# torch 2.13 renamed it.
_RENAMED = hasattr(collectives, "all_gather_single")
all_gather = getattr(collectives, "all_gather_single" if _RENAMED else "all_gather_tensor")


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`(B, Hq, 1, D)` to `(B, 1, Hq * D)`; K and V are repeated for the query heads."""
    times = query.shape[1] // key.shape[1]
    wide = [x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for x in (key, value)]
    output = F.scaled_dot_product_attention(query, *wide)
    return output.transpose(1, 2).reshape(query.shape[0], 1, -1)


class Layer(nn.Module):
    """A gated attention layer whose K and V are written before they are read."""

    def __init__(self, query_heads: int, kv_heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Linear(HIDDEN, query_heads * HEAD_DIM * 2, bias=False)
        self.key = nn.Linear(HIDDEN, kv_heads * HEAD_DIM, bias=False)
        self.output = nn.Linear(query_heads * HEAD_DIM, HIDDEN, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(BATCH, kv_heads, LENGTH, HEAD_DIM))
        self.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        query, gate = self.query(hidden).view(BATCH, 1, -1, 2 * HEAD_DIM).chunk(2, -1)
        new = self.key(hidden).view(BATCH, 1, -1, HEAD_DIM).transpose(1, 2)
        key = torch.cat([self.keys[:, :, :-1], new], 2)
        output = attend(query.transpose(1, 2), key, self.values)
        result: Tensor = self.output(output * torch.sigmoid(gate.reshape(BATCH, 1, -1)))
        return result


class Ranks:
    """What the scenarios share on one rank."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh(device.type, (self.world,))
        self.generator = torch.Generator().manual_seed(3)
        self.hidden = self.draw(BATCH, 1, HIDDEN)

    def draw(self, *size: int) -> Tensor:
        """The same random numbers on every rank."""
        return torch.randn(size, generator=self.generator).to(self.device)

    def own(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's share of `tensor`, a view of it."""
        return tensor.chunk(self.world, dim)[self.rank]

    def shard(self, layer: Layer, replicate_key: bool = False) -> nn.Module:
        """A tensor-parallel copy of `layer`, each rank with its own heads."""
        sharded = copy.deepcopy(layer)
        plan: dict[str, Any] = {"query": ColwiseParallel(), "output": RowwiseParallel()}
        if not replicate_key:
            plan["key"] = ColwiseParallel()
            for name in ("keys", "values"):
                setattr(sharded, name, self.own(getattr(sharded, name), 1).contiguous())
        return parallelize_module(sharded, self.mesh, plan)

    def check(
        self, whole: Callable[..., Tensor], sharded: Callable[..., Tensor], *args: Any
    ) -> dict[str, Any]:
        """The error of `sharded`, compiled with the fusion and not, against `whole` in float64."""
        torch._dynamo.reset()
        counters.clear()
        exact = whole(*[x.double() if isinstance(x, Tensor) else x for x in args])
        plain = sharded(*args)
        step = torch.compile(sharded, backend="fusion_pass", options=CPU_AND_GPU)
        found = step(*args)
        return {"fusion_pass": dict(counters["fusion_pass"])} | errors(found, plain, exact)


def errors(found: Tensor, plain: Tensor, exact: Tensor) -> dict[str, float]:
    """The norms of the errors with the fusion and without, and of what float32 cannot tell."""
    return {
        "error": float((found - exact).norm()),
        "error without": float((plain - exact).norm()),
        "rounding": torch.finfo(torch.float32).eps * float(exact.norm()),
    }


def is_as_exact(seen: dict[str, Any]) -> bool:
    """Whether the fused result is about as close to float64 as the one without the fusion."""
    return bool(seen["error"] <= 1.5 * seen["error without"] + seen["rounding"])


def heads(ranks: Ranks, query_heads: int, kv_heads: int) -> dict[str, Any]:
    """One tensor-parallel layer; where the K/V heads are too few, every rank holds them."""
    layer = Layer(query_heads, kv_heads).to(ranks.device)
    exact = copy.deepcopy(layer).double()
    sharded = ranks.shard(layer, replicate_key=kv_heads < ranks.world)
    return ranks.check(exact, sharded, ranks.hidden)


def fsdp(ranks: Ranks) -> dict[str, Any]:
    """Two layers whose parameters are gathered before use."""
    layers = nn.Sequential(Layer(4, 2), Layer(8, 2)).to(ranks.device)
    exact = copy.deepcopy(layers).double()
    for layer in layers:
        fully_shard(layer, mesh=ranks.mesh)
    fully_shard(layers, mesh=ranks.mesh)
    return ranks.check(exact, layers, ranks.hidden)


def _operands(ranks: Ranks) -> tuple[Tensor, ...]:
    stored = (BATCH, 2, LENGTH, HEAD_DIM)
    query, key, value = ranks.draw(BATCH, 4, 1, HEAD_DIM), ranks.draw(*stored), ranks.draw(*stored)
    return query, key, value, ranks.draw(BATCH, 1, 4 * HEAD_DIM)


def _gated(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    return attend(query, key, value) * torch.sigmoid(gate)


def views(ranks: Ranks) -> dict[str, Any]:
    """Every operand is a shard that begins within the storage of the whole."""

    def whole(*operands: Tensor) -> Tensor:
        return ranks.own(_gated(*operands), 2)

    def sharded(*operands: Tensor) -> Tensor:
        own = [ranks.own(x, dim) for x, dim in zip(operands, (1, 1, 1, 2), strict=True)]
        return step(*own)

    torch._dynamo.reset()
    step = torch.compile(_gated, backend="fusion_pass", options=CPU_AND_GPU)
    operands = _operands(ranks)
    counters.clear()
    found = sharded(*operands)
    fused = dict(counters["fusion_pass"])
    exact = whole(*[x.double() for x in operands])
    return {"fusion_pass": fused} | errors(found, whole(*operands), exact)


def distributed_gate(ranks: Ranks) -> dict[str, Any]:
    """The product is of distributed tensors, each sharded over the heads."""

    def sharded(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        output = attend(ranks.own(query, 1), ranks.own(key, 1), ranks.own(value, 1))
        over = [DTensor.from_local(x, ranks.mesh, [Shard(2)]) for x in (output, gate)]
        product: DTensor = over[0] * torch.sigmoid(over[1])
        return product.to_local()

    query, key, value, gate = _operands(ranks)
    own = ranks.own(gate, 2).contiguous()
    everything = {torch.float32: gate, torch.float64: gate.double()}

    def whole(query: Tensor, key: Tensor, value: Tensor, own: Tensor) -> Tensor:
        return ranks.own(_gated(query, key, value, everything[query.dtype]), 2)

    return ranks.check(whole, sharded, query, key, value, own)


def gathered(ranks: Ranks) -> dict[str, Any]:
    """Query and gate come from collectives within the graph, and the product goes into one."""

    def sharded(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        query = all_gather(ranks.own(query, 1).contiguous(), 1, ranks.mesh)
        gate = gate / ranks.world
        dist.all_reduce(gate)
        result = _gated(query, key, value, gate)
        dist.all_reduce(result)
        return result / ranks.world

    return ranks.check(_gated, sharded, *_operands(ranks))


def awaited(ranks: Ranks) -> dict[str, Any]:
    """The gate comes into the graph from a collective that has not been waited for."""

    def sharded(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        own = ranks.own(gate, 2).contiguous()
        return step(query, key, value, all_gather(own, 2, ranks.mesh))

    torch._dynamo.reset()
    step = torch.compile(_gated, backend="fusion_pass", options=CPU_AND_GPU)
    operands = _operands(ranks)
    counters.clear()
    found = sharded(*operands)
    fused = dict(counters["fusion_pass"])
    exact = _gated(*[x.double() for x in operands])
    return {"fusion_pass": fused} | errors(found, _gated(*operands), exact)


def settings_by_rank(ranks: Ranks) -> dict[str, Any]:
    """Over one cache folder the first rank fuses while the others do not, and then the reverse."""
    operands = _operands(ranks)
    exact = _gated(*[x.double() for x in operands])
    seen: dict[str, Any] = {"calls": [], "cache hits": []}
    caches = torch._inductor.config.patch(fx_graph_cache=True)
    with caches, torch._functorch.config.patch(enable_autograd_cache=True):
        for turn in range(3):
            enabled = (ranks.rank == 0) == (turn != 1)
            torch._dynamo.reset()
            counters.clear()
            options = CPU_AND_GPU | {"fusion_pass.enabled": enabled}
            step = torch.compile(_gated, backend="fusion_pass", options=options)
            found = step(*operands)
            with torch.profiler.profile() as profile:
                step(*operands)
                if ranks.device.type == "cuda":
                    torch.cuda.synchronize()
            names = [event.name for event in profile.events()]
            fused = any("gated_decode" in name for name in names)
            seen["calls"].append((enabled, fused))
            seen["cache hits"].append(counters["inductor"]["fxgraph_cache_hit"])
            dist.barrier()
    return seen | errors(found, _gated(*operands), exact)


SCENARIOS: dict[str, tuple[Callable[..., dict[str, Any]], tuple[int, ...], int]] = {
    "grouped heads": (heads, (8, 2), 1),
    "one head a rank": (heads, (2, 2), 1),
    "replicated key and value": (heads, (4, 1), 1),
    "shards are views": (views, (), 1),
    "a distributed gate": (distributed_gate, (), 1),
    "collectives in the graph": (gathered, (), 1),
    "an awaited gate": (awaited, (), 1),
    "FSDP": (fsdp, (), 2),
}
"""By name: a scenario, its arguments after the `Ranks`, and how many attentions fuse."""


@torch.no_grad()
def observe(device: torch.device) -> dict[str, dict[str, Any]]:
    """Every scenario on this rank, by name."""
    ranks = Ranks(device)
    seen = {}
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        for name, (scenario, arguments, _) in SCENARIOS.items():
            seen[name] = scenario(ranks, *arguments)
    seen["settings by rank"] = settings_by_rank(ranks)
    return seen
