"""Small programs that are declined, at least one for every reason that a program alone can give.

Each is written as the one expression that the docs show, over these inputs: `query`
(B, Hq, Q, D), `key` and `value` (B, Hkv, S, D), a boolean `keep` (B, 1, 1, S) and a `gate`
(B, Q, Hq * D).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fusion_pass.patterns import Reason
from tests.postgrad import Rewrite, rewrite

BATCH, LENGTH = 2, 48
INPUTS = ("query", "key", "value", "keep", "gate")


@dataclass(frozen=True)
class Decline:
    """A program that is declined.

    Attributes:
        page: the page of docs/patterns that lists it.
        reason: why it is declined.
        written: the program, an expression over `INPUTS` and `NAMES`.
        needs_gradient: whether it is compiled for a gradient.
        has_symbolic_batch: whether the batch size is symbolic.
        settings: fields of `Config`.
    """

    page: str
    reason: Reason
    written: str
    heads: int = 4
    kv_heads: int = 2
    tokens: int = 1
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    needs_gradient: bool = False
    has_symbolic_batch: bool = False
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def program(self) -> Callable[..., Any]:
        """The program as a function of `INPUTS`."""
        function: Callable[..., Any] = eval(f"lambda {', '.join(INPUTS)}: ({self.written})", NAMES)
        return function

    def inputs(self) -> tuple[Tensor, ...]:
        """Random inputs of the program."""
        generator = torch.Generator().manual_seed(0)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(self.dtype)

        keep = torch.rand(BATCH, 1, 1, LENGTH, generator=generator) < 0.5
        return (
            draw(BATCH, self.heads, self.tokens, self.head_dim),
            draw(BATCH, self.kv_heads, LENGTH, self.head_dim),
            draw(BATCH, self.kv_heads, LENGTH, self.head_dim),
            keep,
            draw(BATCH, self.tokens, self.heads * self.head_dim),
        )

    def changes(self) -> list[str]:
        """What else is unusual about it, in words."""
        usual = Decline(self.page, self.reason, self.written)
        dtype = str(self.dtype).removeprefix("torch.")
        said = {
            "heads": f"{self.heads} query heads",
            "kv_heads": f"{self.kv_heads} K/V heads",
            "tokens": f"{self.tokens} query tokens",
            "head_dim": f"head_dim {self.head_dim}",
            "dtype": f"in {dtype}",
            "needs_gradient": "query needs a gradient",
            "has_symbolic_batch": "symbolic batch",
            "settings": ", ".join(f"`{name}={value!r}`" for name, value in self.settings.items()),
        }
        return [
            words for name, words in said.items() if getattr(self, name) != getattr(usual, name)
        ]

    @functools.cache  # noqa: B019  (the cases live as long as the module)
    def run(self) -> Rewrite:
        """What the pass makes of it."""
        inputs = self.inputs()
        if self.needs_gradient:
            inputs[0].requires_grad_()
        if self.has_symbolic_batch:
            for tensor in inputs:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        with torch.set_grad_enabled(self.needs_gradient):
            return rewrite(self.program, *inputs, **self.settings)


def flat(output: Tensor) -> Tensor:
    """`(B, H, Q, D)` as `(B, Q, H * D)`."""
    return output.transpose(1, 2).flatten(2)


def wide(tensor: Tensor) -> Tensor:
    """K or V once for each of four query heads."""
    return tensor.repeat_interleave(4 // tensor.shape[1], dim=1)


def flex(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Any:
    """FlexAttention with shared K/V heads."""
    return flex_attention(query, key, value, enable_gqa=True, **keywords)


def half_masked(mask_mod: Callable[..., Tensor] | None = None, batch: int = 1) -> BlockMask:
    """A block mask over the first 32 keys, listed for each of `batch` rows."""
    counts = torch.full((batch, 1, 1), 2, dtype=torch.int32)
    blocks = torch.tensor([0, 1, 2], dtype=torch.int32).expand(batch, 1, 1, 3)
    mask: Any = BlockMask
    made: BlockMask = mask.from_kv_blocks(
        counts, blocks, BLOCK_SIZE=16, mask_mod=mask_mod, seq_lengths=(1, LENGTH)
    )
    return made


NAMES = {
    "F": F,
    "flash": torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    "flat": flat,
    "flex": flex,
    "half_masked": half_masked,
    "inf": math.inf,
    "sdpa": F.scaled_dot_product_attention,
    "torch": torch,
    "wide": wide,
}

_SDPA = "sdpa(query, wide(key), wide(value))"
_LOGITS = "query @ wide(key).mT"


def _gated(attention: str) -> str:
    return f"flat({attention}) * torch.sigmoid(gate)"


FUSED_SDPA = (
    Decline(
        "fused-sdpa",
        Reason.DROPOUT,
        _gated("flash(query, wide(key), wide(value), 0.1)[0]"),
    ),
    Decline(
        "fused-sdpa",
        Reason.CAUSAL,
        _gated("flash(query, wide(key), wide(value), is_causal=True, attn_mask=keep * 1.0)[0]"),
    ),
    Decline(
        "fused-sdpa",
        Reason.STATISTICS_USED,
        "flat((both := flash(query, wide(key), wide(value)))[0]) * torch.sigmoid(gate), both[1]",
    ),
    Decline(
        "fused-sdpa",
        Reason.ATTENTION_LAYOUT,
        "sdpa(query, key, value).reshape(4, 1, 48) * torch.sigmoid(gate.view(4, 1, 48))",
        heads=3,
        kv_heads=3,
    ),
)

SPELLED_OUT = (
    Decline(
        "spelled-out",
        Reason.LOGITS,
        _gated(
            f"(20 * torch.tanh({_LOGITS} / 20) + torch.where(keep, 0.0, -inf)).softmax(-1) "
            "@ wide(value)"
        ),
    ),
    Decline(
        "spelled-out",
        Reason.LOGITS,
        _gated(
            f"({_LOGITS} + torch.where(keep, 0.0, -inf) + value[:, :1, None, :, 0]).softmax(-1) "
            "@ wide(value)"
        ),
    ),
    Decline(
        "spelled-out",
        Reason.MASK_DTYPE,
        _gated(f"({_LOGITS} + keep.double()).to(query.dtype).softmax(-1) @ wide(value)"),
    ),
    Decline(
        "spelled-out",
        Reason.STATISTICS_USED,
        f"flat((weights := ({_LOGITS}).softmax(-1)) @ wide(value)) * torch.sigmoid(gate), weights",
    ),
    Decline(
        "spelled-out",
        Reason.MASK_LAYOUT,
        "flat((((query @ wide(key).mT).view(2, 2, 2, 1, 48) + key[:, :, :1, :1, None].mT)"
        ".softmax(-1)).view(2, 4, 1, 48) @ wide(value)) * torch.sigmoid(gate)",
    ),
    Decline(
        "spelled-out",
        Reason.KEY_VALUE_LAYOUT,
        "(query.flatten(0, 1) @ wide(key).flatten(0, 1).mT).softmax(-1) @ "
        "wide(value).flatten(0, 1) * torch.sigmoid(gate.view(-1, 1, 32))",
        has_symbolic_batch=True,
    ),
)

SINKS = (
    Decline(
        "sinks",
        Reason.SINKS,
        _gated(
            f"torch.cat([{_LOGITS}, query.sum(-1, keepdim=True)], -1).softmax(-1)[..., :-1] "
            "@ wide(value)"
        ),
    ),
)

FLEX = (
    Decline(
        "flex-attention",
        Reason.SCORE_MOD,
        _gated("flex(query, key, value, score_mod=lambda s, b, h, q, k: 20 * torch.tanh(s / 20))"),
    ),
    Decline(
        "flex-attention",
        Reason.SCORE_MOD,
        _gated("flex(query, key, value, score_mod=lambda s, b, h, q, k: s - (q - k) * 0.5)"),
    ),
    Decline(
        "flex-attention",
        Reason.SCALE,
        "flex(query, key, value, scale=query.shape[0] ** -0.5) * "
        "torch.sigmoid(gate.view(-1, 4, 1, 32))",
        has_symbolic_batch=True,
    ),
    Decline(
        "flex-attention",
        Reason.BLOCK_MASK,
        _gated("flex(query, key, value, block_mask=half_masked(batch=4))"),
    ),
    Decline(
        "flex-attention",
        Reason.MASK_MOD,
        _gated("flex(query, key, value, block_mask=half_masked(lambda b, h, q, k: k / 2 < 5))"),
    ),
    Decline(
        "flex-attention",
        Reason.MASK_FILL,
        _gated(
            "flex(query, key, value, block_mask=half_masked(), "
            "score_mod=lambda s, b, h, q, k: torch.where(k < 9, s, -1e9))"
        ),
    ),
    Decline(
        "flex-attention",
        Reason.KERNEL_OPTION,
        _gated("flex(query, key, value, kernel_options={'BACKEND': 'FLASH'})"),
    ),
    Decline(
        "flex-attention",
        Reason.STATISTICS_USED,
        "flat((both := flex(query, key, value, return_lse=True))[0]) * torch.sigmoid(gate), "
        "both[1]",
    ),
)

GATES = (
    Decline("gate", Reason.NOT_SIGMOID, f"flat({_SDPA}) * F.silu(gate)"),
    Decline("gate", Reason.NOT_SIGMOID, f"flat({_SDPA}) * torch.tanh(gate)"),
    Decline("gate", Reason.NOT_SIGMOID, f"flat({_SDPA}) * (2 * torch.sigmoid(gate))"),
    Decline("gate", Reason.NOT_SIGMOID, f"flat({_SDPA}) * 0.5"),
    Decline("gate", Reason.DROPOUT, f"F.dropout(flat({_SDPA}), 0.1) * torch.sigmoid(gate)"),
    Decline("gate", Reason.LEAVES_GRAPH, f"flat({_SDPA})"),
    Decline("gate", Reason.NO_GATE, f"flat({_SDPA}) + torch.sigmoid(gate)"),
    Decline("gate", Reason.OUTPUT_USED, f"(o := flat({_SDPA})) * torch.sigmoid(gate), o"),
    Decline(
        "gate",
        Reason.OUTPUT_USED,
        f"(o := flat({_SDPA})) * torch.sigmoid(o)",
    ),
    Decline(
        "gate",
        Reason.GATE_LAYOUT,
        f"{_SDPA}.view(2, 4, 1, 2, 16) * torch.sigmoid(gate.view(2, 4, 1, 2, 16)[..., :1, :])",
    ),
    Decline(
        "gate",
        Reason.GATE_DTYPE,
        f"flat({_SDPA}) * torch.sigmoid(gate.double())",
        dtype=torch.bfloat16,
    ),
    Decline(
        "gate",
        Reason.NUMERICS,
        f"flat({_SDPA}) * (1 / (1 + torch.exp(-gate)))",
        settings={"numerics": "eager"},
    ),
)

OPERANDS = (
    Decline("operands", Reason.QUERY_TOKENS, _gated(_SDPA), tokens=17),
    Decline("operands", Reason.HEAD_DIM, _gated(_SDPA), head_dim=20),
    Decline(
        "operands",
        Reason.GROUP,
        _gated("sdpa(query, key, value, enable_gqa=True)"),
        heads=130,
    ),
    Decline("operands", Reason.DTYPE, _gated(_SDPA), dtype=torch.float64),
    Decline("operands", Reason.DEVICE, _gated(_SDPA), settings={"devices": ("cuda",)}),
    Decline("operands", Reason.UNPROFITABLE, _gated(_SDPA), settings={"policy": "never"}),
    Decline("operands", Reason.TRAINING, _gated(_SDPA), needs_gradient=True),
    Decline(
        "operands",
        Reason.STRIDES_USED,
        f"({_SDPA} * torch.sigmoid(gate.view(2, 1, 4, 32).transpose(1, 2)))"
        ".as_strided((2, 128), (128, 1)) + 1",
    ),
)

DECLINES = (*FUSED_SDPA, *SPELLED_OUT, *SINKS, *FLEX, *GATES, *OPERANDS)
