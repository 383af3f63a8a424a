"""What a FlexAttention score_mod does to the score, where it is a scale and masks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch.fx import GraphModule, Node

from .mask import LARGEST_FILL
from .mask_program import Apply, Captured, Constant, Expression, Lookup
from .reason import Decline, Reason
from .subgraph import Score, Value, evaluate, result
from .trace import CAST, aten, rounded, shape, source, tensor

_WIDE = (torch.float32, torch.float64)
_BIASES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class ScoreMod:
    """`where(all conditions, scale * score + bias, -inf)`, or another fill in place of -inf.

    Attributes:
        scale: a constant.
        conditions: booleans, True where the key is attended to.
        fill: what the one condition adds where it is False; -inf if there are several.
        replaces: whether the fill takes the place of the score instead.
        bias: floating.
    """

    scale: float = 1.0
    conditions: tuple[Expression, ...] = ()
    fill: float = -math.inf
    replaces: bool = False
    bias: Lookup | Captured | None = None

    @property
    def is_filled(self) -> bool:
        """Whether a key that is kept away still has a finite logit."""
        return self.fill != -math.inf


def read_score_mod(module: GraphModule, inputs: list[Value | None]) -> ScoreMod | Decline:
    """Walk from what a score_mod returns back to the score.

    `inputs` are those of the subgraph: the score, the four indices and the captured buffers.
    """
    values = evaluate(module, inputs)
    node, found = result(module), ScoreMod()
    score = next(iter(module.graph.nodes))
    while node is not score:
        step = _before(node, values, found) if node is not None else None
        if step is None or node is None:
            spelled = f"{node.name} ({node.target})" if node is not None else "its result"
            return Decline(
                Reason.SCORE_MOD,
                f"{spelled} changes the score in a way that is not a constant scale or a mask",
            )
        node, found = step
    return found


def _before(node: Node, values: dict[Node, Value], found: ScoreMod) -> tuple[Node, ScoreMod] | None:
    """The operand of `node` that the score comes through, and what is known with `node` read."""
    scored = [operand for operand in node.all_input_nodes if isinstance(values[operand], Score)]
    if len(scored) != 1:
        return None
    score = scored[0]
    if _is_same(node, score):
        return score, found
    if node.target in _SCALINGS:
        factor = _factor(node, score, values)
        return None if factor is None else (score, replace(found, scale=found.scale * factor))
    after = None
    if found.bias is not None:
        return None
    if node.target is aten.where.self:
        after = _selected(node, score, values, found)
    elif node.target is aten.add.Tensor and node.kwargs.get("alpha", 1) == 1:
        others = [values[x] for x in node.args if isinstance(x, Node) and x is not score]
        after = _added(others, found)
    return None if after is None else (score, after)


_SCALINGS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)


def _is_same(node: Node, score: Node) -> bool:
    """Whether a node is the score itself, in a dtype that loses nothing of it."""
    if node.target is CAST:
        own = tensor(next(iter(node.graph.nodes))).dtype
        return tensor(node).dtype in (own, *_WIDE)
    return source(node) is score and shape(node) == shape(score)


def _factor(node: Node, score: Node, values: dict[Node, Value]) -> float | None:
    """The constant that a node multiplies the score by."""
    first, second = node.args
    divides = node.target in (aten.div.Tensor, aten.div.Scalar)
    if first is second or (divides and (first is not score or node.kwargs)):
        return None
    other = second if first is score else first
    factor = _constant(values[other]) if isinstance(other, Node) else other
    if not isinstance(factor, (int, float)) or not math.isfinite(factor) or factor == 0:
        return None
    return 1.0 / factor if divides else float(factor)


def _constant(value: object) -> float | None:
    return rounded(value.value, value.dtype) if isinstance(value, Constant) else None


def _selected(
    node: Node, score: Node, values: dict[Node, Value], found: ScoreMod
) -> ScoreMod | None:
    """`where(keep, score, fill)` or `where(drop, fill, score)`."""
    condition, kept, dropped = cast("tuple[Node, Node, Node]", node.args)
    keep = values[condition]
    fill = _constant(values[dropped if kept is score else kept])
    if not isinstance(keep, Expression) or fill is None:
        return None
    return _masked(found, keep if kept is score else _negated(keep), fill, replaces=True)


def _added(others: list[Value], found: ScoreMod) -> ScoreMod | None:
    """`score + where(keep, 0, fill)`, its reverse, or a bias that is looked up."""
    if len(others) != 1:
        return None
    (other,) = others
    if isinstance(other, Apply) and other.target is aten.where.self:
        keep, first, second = other.arguments
        kept, dropped = _constant(first), _constant(second)
        if dropped == 0.0 and kept is not None:
            keep, kept, dropped = _negated(keep), dropped, kept
        if kept != 0.0 or dropped is None:
            return None
        return _masked(found, keep, dropped, replaces=False)
    return _biased(other, found)


def _biased(other: Value, found: ScoreMod) -> ScoreMod | None:
    if found.scale != 1.0 or found.is_filled:
        return None
    if not isinstance(other, (Lookup, Captured)):
        return None
    node = other.table if isinstance(other, Lookup) else other.node
    if not isinstance(node.meta["val"], torch.Tensor) or tensor(node).dtype not in _BIASES:
        return None
    return replace(found, bias=other)


def _masked(found: ScoreMod, keep: Expression, fill: float, replaces: bool) -> ScoreMod | None:
    """`found` after one more mask inside of what it has."""
    conditions = (*found.conditions, keep)
    if fill == -math.inf:
        unclear = found.scale < 0 or found.is_filled
        return None if unclear else replace(found, conditions=conditions)
    alone = found.scale == 1.0 and not found.conditions
    if not (alone and fill <= LARGEST_FILL):
        return None
    return replace(found, conditions=conditions, fill=fill, replaces=replaces)


def _negated(condition: Expression) -> Expression:
    return Apply(aten.logical_not.default, (condition,), (), torch.bool)
