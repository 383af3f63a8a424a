"""Gated attentions as they reach the post-grad graph, traced on fake tensors of any device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from fusion_pass import GatedAttentionPass, patterns

aten = torch.ops.aten


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention; sizes that coincide hide no mistake in the layout."""

    batch: int = 2
    query_heads: int = 8
    kv_heads: int = 2
    query_tokens: int = 1
    kv_length: int = 48
    head_dim: int = 16
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    def empty(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of the given size; fake under a fake mode."""
        return torch.empty(size, dtype=dtype or self.dtype, device=self.device)

    def query(self) -> Tensor:
        return self.empty(self.batch, self.query_heads, self.query_tokens, self.head_dim)

    def stored(self) -> Tensor:
        return self.empty(self.batch, self.kv_heads, self.kv_length, self.head_dim)

    def gate(self) -> Tensor:
        return self.empty(self.batch, self.query_tokens, self.query_heads * self.head_dim)


def trace(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """The ATen graph of `function` on fake inputs, without dead nodes."""
    assert isinstance(inputs[0], FakeTensor)
    with inputs[0].fake_mode:
        module = make_fx(function)(*inputs)
    module.graph.eliminate_dead_code()
    return module


def fake_mode(symbolic: bool = False) -> FakeTensorMode:
    """A mode in which tensors of any device can be made on any machine."""
    return FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)


def symbolic(mode: FakeTensorMode, tensor: Tensor, dynamic: tuple[int, ...]) -> Tensor:
    """A fake of `tensor` whose sizes among `dynamic` are symbols."""
    sizes = [DimDynamic.DYNAMIC if size in dynamic else DimDynamic.STATIC for size in tensor.shape]
    context = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(
        tensor, symbolic_context=context, source=ConstantSource(f"t{id(tensor)}")
    )


PRODUCERS = ("cudnn", "flash", "efficient", "cpu-flash")


def attend(
    producer: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **keywords: Any
) -> Tensor:
    """The output of one fused attention operator."""
    if producer == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(query, key, value, mask, False, **keywords)[
            0
        ]
    if producer == "efficient":
        if mask is not None:
            mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, False, **keywords
        )[0]
    if producer == "flash":
        assert mask is None
        return aten._scaled_dot_product_flash_attention(query, key, value, **keywords)[0]
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=mask, **keywords
    )[0]


def repeat_kv(tensor: Tensor, times: int) -> Tensor:
    """K or V once per query head, as transformers writes it."""
    batch, heads, length, dim = tensor.shape
    # Indexing a fake CUDA tensor needs a CUDA build; unsqueeze does not.
    wide = tensor.unsqueeze(2).expand(batch, heads, times, length, dim)
    return wide.reshape(batch, heads * times, length, dim)


def where_mask(keep: Tensor, dtype: torch.dtype, fill: float = -math.inf) -> Tensor:
    """A boolean mask as the additive bias that PyTorch makes of it."""
    zero = torch.full((), 0.0, dtype=dtype, device=keep.device)
    dead = torch.full((), fill, dtype=dtype, device=keep.device)
    return torch.where(keep, zero, dead)


def merge_heads(output: Tensor) -> Tensor:
    """`(B, H, Q, D)` as `(B, Q, H * D)`."""
    return output.transpose(1, 2).reshape(output.shape[0], output.shape[2], -1)


def recognitions(graph: Graph) -> list[patterns.Recognition]:
    """What recognition makes of every attention in `graph`."""
    found = [patterns.recognise(node) for node in graph.nodes]
    return [recognition for recognition in found if recognition is not None]


def only_match(graph: Graph) -> patterns.GatedAttention:
    """The one gated attention of `graph`."""
    (recognition,) = recognitions(graph)
    assert isinstance(recognition.outcome, patterns.GatedAttention), recognition.outcome
    return recognition.outcome


def only_refusal(graph: Graph) -> patterns.Decline:
    """Why the one attention of `graph` is no match."""
    (recognition,) = recognitions(graph)
    assert isinstance(recognition.outcome, patterns.Decline), recognition.outcome
    return recognition.outcome


def placeholder(graph: Graph, name: str) -> Node:
    """An input of the graph, by the name of the traced function's parameter."""
    return next(n for n in graph.nodes if n.op == "placeholder" and n.name.startswith(name))


CPU = Shape(device="cpu", dtype=torch.float32)
CUDA = Shape(batch=8, query_heads=16, kv_length=4096, head_dim=256)


def qwen(producer: str) -> Callable[..., Tensor]:
    """A gated attention as Qwen3.5 writes it."""

    def forward(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, fused: Tensor) -> Tensor:
        batch, heads, tokens, dim = query.shape
        times = heads // key.shape[1]
        mask = where_mask(keep, query.dtype, -65536.0)
        output = attend(producer, query, repeat_kv(key, times), repeat_kv(value, times), mask)
        gate = fused.view(batch, tokens, heads, 2 * dim).chunk(2, -1)[1]
        return merge_heads(output) * torch.sigmoid(gate.reshape(batch, tokens, -1))

    return forward


def qwen_inputs(shape: Shape) -> tuple[Tensor, ...]:
    """Inputs for `qwen`: query, K, V, a boolean mask over the keys, query and gate projected."""
    return (
        shape.query(),
        shape.stored(),
        shape.stored(),
        shape.empty(shape.batch, 1, 1, shape.kv_length, dtype=torch.bool),
        shape.empty(shape.batch, shape.query_tokens, 2 * shape.query_heads * shape.head_dim),
    )


def run_pass(module: GraphModule, *, is_inference: bool = True, **options: Any) -> int:
    """Run a strict pass over the module's graph; the number of fused attentions."""
    before = counters["fusion_pass"]["fused"]
    GatedAttentionPass(strict=True, **options)(module.graph, is_inference)
    module.graph.lint()
    module.recompile()
    return counters["fusion_pass"]["fused"] - before
