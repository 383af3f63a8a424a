"""Whether fusing a gated attention that the kernel can run pays, and on what ground."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch.fx import Node

from fusion_pass.config import Config
from fusion_pass.patterns import GatedAttention
from fusion_pass.patterns.trace import shape, source, tensor
from fusion_pass.tables import Shape, Table
from fusion_pass.tables.store import Key, device_key, in_force

_aten = torch.ops.aten
DECOMPOSED = "decomposed"
# Its own block mask lets FlexAttention pass over dead keys too.
SKIPS_DEAD_KEYS = "flex"
ASSUMED = "assumed, not measured"
"""The ground of a fusion that is judged for a GPU of which nothing is measured."""


@dataclass(frozen=True)
class Verdict:
    """Whether to fuse, and why, in words."""

    fuse: bool
    ground: str


class Judge:
    """Decides for the attentions of one graph, whose device's table is looked for once.

    Nothing is measured of an assumed GPU: there fusing is taken to pay.
    """

    def __init__(self, config: Config, *, is_assumed: bool) -> None:
        self._policy = config.policy
        self._is_assumed = is_assumed
        self._table_of = functools.cache(functools.partial(table_for, config=config))

    def __call__(self, match: GatedAttention) -> Verdict:
        """Whether fusing `match` pays."""
        table = self._table_of(tensor(match.attention.query.node).device)
        if not self._is_assumed or self._policy != "measured":
            return decide(match, self._policy, table)
        saving = structural_saving(match)
        return Verdict(True, f"structural: {saving}" if saving else ASSUMED)


def decide(match: GatedAttention, policy: str, table: Table | None) -> Verdict:
    """Whether fusing `match` pays, by the policy and the table in force for its device.

    "always" and "never" decide alone. By "measured" an attention is fused where that saves more
    than the gate's kernel, whatever the device: a copy of K and V for every query head, logits
    and weights in memory, or reading the dead keys of a static cache. Where only the gate would
    be saved, the table decides; without one the attention is left alone. A CPU is rewritten only
    if it is asked for, and then everywhere.
    """
    if policy != "measured":
        return Verdict(policy == "always", f'the policy is "{policy}"')
    if tensor(match.attention.query.node).device.type == "cpu":
        return Verdict(True, "the CPU was asked for; nothing is measured on it")
    if saving := structural_saving(match):
        return Verdict(True, f"structural: {saving}")
    return _measured(measured_shape(match), table)


def structural_saving(match: GatedAttention) -> str | None:
    """What fusing saves besides the gate's kernel on any device, in words; None if nothing."""
    attention, stored = match.attention, match.key_value
    pairs = ((attention.key.node, stored.key.node), (attention.value.node, stored.value.node))
    if match.pages is not None:
        return "K and V are gathered from their pages to memory"
    if any(_is_repeated(read, kept) for read, kept in pairs):
        return "K and V are written to memory once more, repeated (repeat_kv)"
    if attention.producer == DECOMPOSED:
        return "logits and weights are written to memory"
    is_static = isinstance(attention.sizes.kv_length, int)
    if match.mask is not None and is_static and attention.producer != SKIPS_DEAD_KEYS:
        return "the mask tells the dead keys of a static cache"
    return None


def _is_repeated(read: Node, stored: Node) -> bool:
    """Whether the attention reads a copy of what is stored, repeated by an expansion."""
    is_copied = False
    node = read
    while node is not stored:
        origin = source(node)
        if origin is None:
            return False
        if node.target is _aten.expand.default and shape(node) != shape(origin):
            return is_copied
        is_copied |= node.target is _aten.clone.default
        node = origin
    return False


def measured_shape(match: GatedAttention) -> Shape:
    """The sizes that a table is asked for; a symbolic batch or KV length is None."""
    sizes = match.attention.sizes
    return Shape(
        query_heads=int(sizes.query_heads),
        kv_heads=match.key_value.heads,
        head_dim=int(sizes.head_dim),
        batch=sizes.batch if isinstance(sizes.batch, int) else None,
        kv_length=sizes.kv_length if isinstance(sizes.kv_length, int) else None,
        query_tokens=int(sizes.query_tokens),
        mask="none" if match.mask is None else "bool",
    )


def _measured(sizes: Shape, table: Table | None) -> Verdict:
    advice = 'measure with `python -m fusion_pass tune`, or set the policy to "always"'
    if table is None:
        return Verdict(
            False, f"only the gate would be saved, and no table covers this device; {advice}"
        )
    ratio = table.ratio(sizes)
    if ratio is None:
        return Verdict(
            False, f"only the gate would be saved, and {table.origin} has nothing like it; {advice}"
        )
    found = f"measured: stock takes {ratio:.2f} times as long as fused ({table.origin})"
    if ratio > table.margin:
        return Verdict(True, found)
    return Verdict(False, f"{found}, and {table.margin:.2f} times are needed")


def table_for(device: torch.device, config: Config) -> Table | None:
    """The table in force for a device; None where no table decides."""
    if config.policy != "measured":
        return None
    return in_force(device_key(device), config.table)


def identity(config: Config, devices: tuple[str, ...]) -> tuple[str | None, ...]:
    """What decisions rest on besides the settings: the tables in force for devices, by name."""
    if config.policy != "measured":
        return ()
    tables = [in_force(Key.of(device), config.table) for device in devices]
    return tuple(None if table is None else table.digest for table in tables)
