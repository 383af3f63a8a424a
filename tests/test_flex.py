"""FlexAttention: which score_mods and masks are read, exactly which keys they leave, and what not.

Most models here are captured as Inductor would and the graph is then run as it is: PyTorch's
template for the CPU (2.13) does not compile with a gate after it. A few go through Inductor whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from fusion_pass import GatedAttentionPass, eligibility, patterns
from fusion_pass.patterns import GatedAttention
from fusion_pass.patterns.fused import LOWEST_IN_BASE_2
from tests.graphs import fake_mode, recognitions, run_pass

B, H, KV, S = 2, 4, 2, 40
D = S  # so that one row of the identity is one key's V
OPTIONS: dict[str, Any] = {"fusion_pass.devices": ("cpu",), "fusion_pass.strict": True}

Model = Callable[..., Any]
Mod = Callable[..., Tensor]

# Called with arguments unpacked from lists, which a type checker cannot follow.
from_kv_blocks: Any = BlockMask.from_kv_blocks
flex: Any = flex_attention


class Captured:
    """A model run from its post-grad graph, after the pass or without it; keeps the last graph."""

    def __init__(self, model: Model, fuse: bool = True, **keywords: Any) -> None:
        self.graphs: list[Graph] = []
        self.before: list[list[patterns.Recognition]] = []
        self._fuse = fuse
        backend = aot_autograd(fw_compiler=self._compile, decompositions=select_decomp_table())
        self._step = torch.compile(model, backend=backend, **keywords)

    def _compile(self, module: GraphModule, inputs: Any) -> Model:
        self.before.append(recognitions(module.graph))
        if self._fuse:
            GatedAttentionPass(strict=True, devices=("cpu",))(module.graph, True)
            module.graph.lint()
            module.recompile()
        self.graphs.append(module.graph)
        return module.forward

    def __call__(self, *args: Any) -> Any:
        with torch.no_grad():
            return self._step(*args)

    @property
    def match(self) -> GatedAttention:
        """The one gated attention of the one graph."""
        ((recognition,),) = self.before
        assert isinstance(recognition.outcome, GatedAttention), recognition.outcome
        return recognition.outcome

    @property
    def reason(self) -> str:
        """Why the one attention of the one graph is no match."""
        ((recognition,),) = self.before
        assert isinstance(recognition.outcome, patterns.Decline)
        return recognition.outcome.reason.value


def inputs(tokens: int = 1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, K, V and a flat gate."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    return draw(B, H, tokens, D), draw(B, KV, S, D), draw(B, KV, S, D), draw(B, tokens, H * D)


def counting(tokens: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs for which the output is the equal weights of the attended keys, each in a place."""
    value = torch.eye(S).expand(B, KV, S, S)
    return (
        torch.zeros(B, H, tokens, D),
        torch.zeros(B, KV, S, D),
        value,
        torch.zeros(B, tokens, H * D),
    )


def gated(output: Tensor, gate: Tensor) -> Tensor:
    return output.transpose(1, 2).reshape(gate.shape) * torch.sigmoid(gate)


def scored(score_mod: Mod | None = None, **keywords: Any) -> Model:
    def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        output = flex(query, key, value, score_mod=score_mod, enable_gqa=True, **keywords)
        return gated(output, gate)

    return model


def masked(*args: Any) -> Tensor:
    """For query, K, V, gate and block mask."""
    query, key, value, gate, mask = args
    return gated(flex(query, key, value, block_mask=mask, enable_gqa=True), gate)


def block_mask(mask_mod: Mod, tokens: int = 1, heads: int | None = None, block: int = 16) -> Any:
    return create_block_mask(mask_mod, B, heads, tokens, S, device="cpu", BLOCK_SIZE=block)


def indices(tokens: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All batch, head, query and key indices, each along its own dimension of four."""
    shape = [1, 1, 1, 1]
    sizes = enumerate((B, H, tokens, S))
    found = [torch.arange(n).reshape([*shape[:d], n, *shape[d + 1 :]]) for d, n in sizes]
    return found[0], found[1], found[2], found[3]


def expected_keys(mask_mod: Mod, tokens: int = 1) -> Tensor:
    """`(B, H, Q, S)`, what eager torch makes of a mod on all indices at once."""
    return mask_mod(*indices(tokens)).expand(B, H, tokens, S)


def attended_keys(output: Tensor) -> Tensor:
    """`(B, H, Q, S)`, which keys have a weight in the output for `counting` inputs."""
    return output.reshape(B, -1, H, S).transpose(1, 2) > 0


def exact(
    args: tuple[Tensor, ...],
    keep: Tensor | None = None,
    bias: Any = 0.0,
    scale: float | None = None,
) -> Tensor:
    """The gated attention in float64."""
    query, key, value, gate = (x.double() for x in args)
    key, value = (x.repeat_interleave(H // KV, 1) for x in (key, value))
    logits = query @ key.mT * (scale or 1 / math.sqrt(D)) + bias
    if keep is not None:
        logits = logits.masked_fill(~keep, -math.inf)
    return gated(torch._safe_softmax(logits, -1) @ value, gate)


def assert_close(found: Tensor, truth: Tensor, stock: Tensor) -> None:
    assert (found - truth).norm() <= 1.5 * (stock - truth).norm()


LENGTHS = torch.tensor([7, 33])
HALF_LENGTHS = torch.tensor([7.5, 33.0], dtype=torch.bfloat16)
OFFSETS = torch.tensor([5, 30])
WINDOWS = torch.tensor([1, 4, 9, 40])
DOCUMENTS = torch.arange(B * S).reshape(B, S) * 7 // 50 % 3
ALIVE = torch.arange(B * H * S).reshape(B, H, S) * 13 % 5 > 1
POSITION = torch.tensor(23)

# Every one has other keys for another batch row, head, query token or key.
MASK_MODS: dict[str, Mod] = {
    "length": lambda b, h, q, k: k < LENGTHS[b],
    "causal": lambda b, h, q, k: k <= q + OFFSETS[b],
    "causal-strict": lambda b, h, q, k: k < q + OFFSETS[b],
    "lower-right": lambda b, h, q, k: k - q <= S - 3,
    "window-4": lambda b, h, q, k: (k <= q + POSITION) & (q + POSITION - k < 4),
    "window-5": lambda b, h, q, k: (k <= q + POSITION) & (q + POSITION - k < 5),
    "window-per-head": lambda b, h, q, k: (k <= q + 30) & (k > q + 30 - WINDOWS[h]),
    "document": lambda b, h, q, k: DOCUMENTS[b, k] == DOCUMENTS[b, q + POSITION],
    "document-of-batch": lambda b, h, q, k: DOCUMENTS[b, k] == b,
    "three-dimensional": lambda b, h, q, k: ALIVE[b, h, k],
    "negative-index": lambda b, h, q, k: DOCUMENTS[b, k - S] == 1,
    "lookup-of-lookup": lambda b, h, q, k: WINDOWS[DOCUMENTS[b, k]] > 1,
    "prefix": lambda b, h, q, k: (k < LENGTHS[b]) | (k <= q + 10),
    "not": lambda b, h, q, k: ~(k < LENGTHS[b]) & (k != 36),
    "logical": lambda b, h, q, k: torch.logical_xor(k < LENGTHS[b], k % 2 == h % 2),
    "dilated": lambda b, h, q, k: (k + h) % 3 == b,
    "chunked": lambda b, h, q, k: (k // 7 == (q + OFFSETS[b]) // 7) & (k <= q + OFFSETS[b]),
    "floor-of-a-number": lambda b, h, q, k: 100 // (k + 1) < 7,
    "negative-floor": lambda b, h, q, k: (k - LENGTHS[b]) // 5 == -2,
    "where": lambda b, h, q, k: torch.where(h < 2, k < LENGTHS[b], k > 30),
    "minimum": lambda b, h, q, k: k < torch.minimum(LENGTHS[b], WINDOWS[h]),
    "half-precision-lookup": lambda b, h, q, k: HALF_LENGTHS[b] > k,
}
OF_QUERY_TOKENS = ("causal", "lower-right", "window-5", "document", "chunked", "length")


class TestMaskMods:
    @pytest.mark.parametrize(
        ("name", "tokens"),
        [(name, 1) for name in MASK_MODS] + [(name, 3) for name in OF_QUERY_TOKENS],
    )
    def test_exactly_those_keys(self, name: str, tokens: int) -> None:
        step = Captured(masked)
        found = step(*counting(tokens), block_mask(MASK_MODS[name], tokens, H))
        assert counters["fusion_pass"] == {"fused": 1}
        expected = expected_keys(MASK_MODS[name], tokens)
        assert 0 < expected.sum() < expected.numel()
        assert torch.equal(attended_keys(found), expected)

    def test_one_key_more_is_another_set(self) -> None:
        for one, other in (("window-4", "window-5"), ("causal-strict", "causal")):
            more = expected_keys(MASK_MODS[other]) & ~expected_keys(MASK_MODS[one])
            assert (more.sum(-1) == 1).all()

    @pytest.mark.parametrize("name", ["causal", "three-dimensional"])
    def test_numbers(self, name: str) -> None:
        args, mask = inputs(), block_mask(MASK_MODS[name], 1, H)
        found = Captured(masked)(*args, mask)
        stock = Captured(masked, fuse=False)(*args, mask)
        assert counters["fusion_pass"] == {"fused": 1}
        assert_close(found, exact(args, expected_keys(MASK_MODS[name])), stock)

    def test_what_does_not_depend_on_an_axis_is_computed_once(self) -> None:
        step = Captured(masked)
        step(*inputs(), block_mask(MASK_MODS["length"]))
        assert mask_shape(step) == (B, 1, 1, S)

    def test_lookups_of_one_dimension_at_a_time(self) -> None:
        step = Captured(masked)
        found = step(*counting(), block_mask(lambda b, h, q, k: ALIVE[b][h][k], 1, H))
        assert torch.equal(attended_keys(found), expected_keys(MASK_MODS["three-dimensional"]))

    def test_always_true_is_no_mask(self) -> None:
        step = Captured(scored())
        step(*inputs())
        assert step.match.mask is None

    def test_made_inside_the_model(self) -> None:
        def model(*args: Any, lengths: Tensor) -> Tensor:
            mask = create_block_mask(
                lambda b, h, q, k: k < lengths[b], B, None, 1, S, device="cpu", BLOCK_SIZE=16
            )
            return masked(*args, mask)

        found = Captured(lambda *args: model(*args[:-1], lengths=args[-1]))(*counting(), LENGTHS)
        assert counters["fusion_pass"] == {"fused": 1}
        assert torch.equal(attended_keys(found), expected_keys(MASK_MODS["length"]))

    def test_its_captured_tensors_are_operands(self) -> None:
        step = Captured(masked)
        step(*inputs(), block_mask(MASK_MODS["length"]))
        mask = step.match.mask
        assert mask is not None
        assert LENGTHS.shape in [node.meta["val"].shape for node in mask.inputs]
        assert set(mask.inputs) <= set(eligibility.operands(step.match))

    def test_layers_share_one_mask(self) -> None:
        def model(
            query: Tensor, key: Tensor, value: Tensor, gate: Tensor, mask: BlockMask
        ) -> Tensor:
            first = masked(query, key, value, gate, mask)
            return masked(first.reshape(query.shape), key, value, gate, mask)

        step = Captured(model)
        found = step(*inputs(), block_mask(MASK_MODS["document"]))
        assert counters["fusion_pass"] == {"fused": 2}
        first, second = fused_nodes(step.graphs[0])
        assert first.args[4] is second.args[4]
        stock = Captured(model, fuse=False)(*inputs(), block_mask(MASK_MODS["document"]))
        torch.testing.assert_close(found, stock)

    def test_other_masks_are_not_shared(self) -> None:
        def model(
            query: Tensor, key: Tensor, value: Tensor, gate: Tensor, *masks: BlockMask
        ) -> Tensor:
            return torch.cat([masked(query, key, value, gate, mask) for mask in masks])

        names = ("window-4", "window-5")
        masks = [block_mask(MASK_MODS[name], 1, H) for name in names]
        both = Captured(model)(*counting(), *masks).chunk(2)
        for name, found in zip(names, both, strict=True):
            assert torch.equal(attended_keys(found), expected_keys(MASK_MODS[name]))


def fused_nodes(graph: Graph) -> list[torch.fx.Node]:
    op = torch.ops.fusion_pass.gated_decode_attention.default
    return list(graph.find_nodes(op="call_function", target=op))


def mask_shape(step: Captured) -> tuple[int, ...]:
    (fused,) = fused_nodes(step.graphs[0])
    mask = fused.args[4]
    assert isinstance(mask, torch.fx.Node)
    return tuple(mask.meta["val"].shape)


class TestBlocks:
    """The lists of blocks count, whatever mask_mod says: compiled flex_attention reads no other."""

    def lists(self, heads: int = 1) -> list[Tensor]:
        """Partial blocks {0} and {2, 0}, full blocks {2} and {}, for the two batch rows."""
        counts = torch.tensor([[[1]], [[2]]], dtype=torch.int32)
        blocks = torch.tensor([[[[0, 1, 2]]], [[[2, 0, 1]]]], dtype=torch.int32)
        full = torch.tensor([[[1]], [[0]]], dtype=torch.int32)
        full_blocks = torch.tensor([[[[2, 1, 0]]], [[[1, 0, 2]]]], dtype=torch.int32)
        found = (counts, blocks, full, full_blocks)
        return [x.expand(B, heads, *x.shape[2:]).clone() for x in found]

    def expected(self, mask_mod: Mod, block: int = 16) -> Tensor:
        _, _, _, key = indices()
        block_of = key // block
        partial = torch.cat([block_of == 0, (block_of == 2) | (block_of == 0)])
        full = torch.cat([block_of == 2, block_of < 0])
        return (partial & expected_keys(mask_mod)) | full

    def from_lists(self, mask_mod: Mod, full: bool = True, heads: int = 1) -> Any:
        lists = self.lists(heads)
        return from_kv_blocks(
            *lists[: 4 if full else 2], BLOCK_SIZE=16, mask_mod=mask_mod, seq_lengths=(1, S)
        )

    @pytest.mark.parametrize("name", ["causal", "dilated"])
    @pytest.mark.parametrize("heads", [1, H])
    def test_a_block_mask_of_another_origin_than_its_mask_mod(self, name: str, heads: int) -> None:
        mask = self.from_lists(MASK_MODS[name], heads=heads)
        found = Captured(masked)(*counting(), mask)
        assert counters["fusion_pass"] == {"fused": 1}
        assert torch.equal(attended_keys(found), self.expected(MASK_MODS[name]))
        assert not torch.equal(attended_keys(found), expected_keys(MASK_MODS[name]))

    def test_without_full_blocks(self) -> None:
        mask = self.from_lists(MASK_MODS["dilated"], full=False)
        found = attended_keys(Captured(masked)(*counting(), mask))
        _, _, _, key = indices()
        listed = torch.cat([key // 16 == 0, key // 16 != 1])
        assert torch.equal(found, expected_keys(MASK_MODS["dilated"]) & listed)

    def test_lists_for_every_head(self) -> None:
        counts, blocks, _, _ = self.lists(H)
        counts[:, 1] = 0
        mask = from_kv_blocks(counts, blocks, BLOCK_SIZE=16, seq_lengths=(1, S))
        found = attended_keys(Captured(masked)(*counting(), mask))
        assert not found[:, 1].any()
        assert found[0, 0, 0].nonzero().flatten().tolist() == list(range(16))

    def test_query_blocks(self) -> None:
        """Query tokens 0 and 1 are of one block, 2 of another."""
        counts = torch.ones(1, 1, 2, dtype=torch.int32)
        blocks = torch.tensor([[[[0, 1, 2], [1, 0, 2]]]], dtype=torch.int32)
        mask = from_kv_blocks(counts, blocks, BLOCK_SIZE=(2, 16), seq_lengths=(3, S))
        found = attended_keys(Captured(masked)(*counting(3), mask))
        first = [keys.nonzero().flatten()[0].item() for keys in found[1, 2]]
        assert first == [0, 0, 16]
        assert (found.sum(-1) == 16).all()

    def test_lookups_beyond_a_table_in_blocks_that_are_skipped(self) -> None:
        short = torch.tensor([True, False]).repeat(8)
        mask = self.from_lists(lambda b, h, q, k: short[k], full=False)
        found = attended_keys(Captured(masked)(*counting(), mask))
        assert found[0, 0, 0].nonzero().flatten().tolist() == list(range(0, 16, 2))

    def test_lists_of_another_batch_decline(self) -> None:
        counts, blocks, _, _ = self.lists()
        wide = [x.repeat(2, *[1] * (x.dim() - 1)) for x in (counts, blocks)]
        mask = from_kv_blocks(*wide, BLOCK_SIZE=16, seq_lengths=(1, S))
        step = Captured(masked)
        step(*counting(), mask)
        assert step.reason == "block-mask"


def kept(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k < LENGTHS[b]) & (k != 3)


MASK_SPELLINGS: list[Mod] = [
    lambda s, *at: torch.where(~kept(*at), -math.inf, s),
    lambda s, *at: s.masked_fill(~kept(*at), -math.inf),
    lambda s, *at: s + torch.where(kept(*at), 0.0, -math.inf),
    lambda s, *at: torch.where(~kept(*at), -math.inf, 0.0) + s,
    lambda s, *at: 0.5 * torch.where(kept(*at), s.double() * 3.0, -math.inf).to(s.dtype),
    lambda s, b, h, q, k: torch.where(k == 3, -math.inf, torch.where(k < LENGTHS[b], s, -math.inf)),
]


class TestScoreMods:
    @pytest.mark.parametrize("scale", [None, 0.3, -1.0])
    def test_identity(self, scale: float | None) -> None:
        args, model = inputs(), scored(scale=scale)
        step = Captured(model)
        found, stock = step(*args), Captured(model, fuse=False)(*args)
        assert step.match.attention.producer == "flex"
        assert step.match.attention.scale == (scale or 1 / math.sqrt(D))
        assert_close(found, exact(args, scale=scale), stock)

    def test_a_head_for_every_query_head(self) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            wide = [x.repeat_interleave(H // KV, 1) for x in (key, value)]
            return gated(flex(query, *wide), gate)

        args, step = inputs(), Captured(model)
        found, stock = step(*args), Captured(model, fuse=False)(*args)
        assert step.match.key_value.heads == KV
        assert_close(found, exact(args), stock)

    @pytest.mark.parametrize("name", ["length", "causal", "window-4", "document", "dilated"])
    def test_masks(self, name: str) -> None:
        keep = MASK_MODS[name]
        model = scored(lambda s, *at: torch.where(keep(*at), s, -math.inf))
        found = attended_keys(Captured(model)(*counting()))
        assert counters["fusion_pass"] == {"fused": 1}
        assert torch.equal(found, expected_keys(keep))

    @pytest.mark.parametrize("spelling", MASK_SPELLINGS)
    def test_spellings_of_a_mask(self, spelling: Mod) -> None:
        found = attended_keys(Captured(scored(spelling))(*counting()))
        assert counters["fusion_pass"] == {"fused": 1}
        assert torch.equal(found, expected_keys(kept))

    @pytest.mark.parametrize(
        ("score_mod", "scale"),
        [
            (lambda s, b, h, q, k: s * 0.5, 0.5),
            (lambda s, b, h, q, k: 3 * s / 4.0, 0.75),
            (lambda s, b, h, q, k: torch.where(k < 20, s * -2.0, -math.inf), -2.0),
        ],
    )
    def test_constant_scales(self, score_mod: Mod, scale: float) -> None:
        args, model = inputs(), scored(score_mod, scale=1.0)
        step = Captured(model)
        found, stock = step(*args), Captured(model, fuse=False)(*args)
        assert step.match.attention.scale == scale
        keep = torch.arange(S) < 20 if scale < 0 else None
        assert_close(found, exact(args, keep, scale=scale), stock)

    def test_mask_and_block_mask_together(self) -> None:
        mask = block_mask(MASK_MODS["dilated"], 1, H)

        def model(*args: Any) -> Tensor:
            output = flex(
                *args[:3],
                score_mod=lambda s, b, h, q, k: torch.where(k < LENGTHS[b], s, -math.inf),
                block_mask=args[4],
                enable_gqa=True,
            )
            return gated(output, args[3])

        found = attended_keys(Captured(model)(*counting(), mask))
        both = expected_keys(MASK_MODS["dilated"]) & expected_keys(MASK_MODS["length"])
        assert counters["fusion_pass"] == {"fused": 1}
        assert torch.equal(found, both)

    @pytest.mark.parametrize("hidden", [False, True])
    def test_bias_that_is_looked_up(self, hidden: bool) -> None:
        bias = torch.randn(B, H, 1, S, generator=torch.Generator().manual_seed(5))
        mask = block_mask(MASK_MODS["length"]) if hidden else None

        def model(*args: Any) -> Tensor:
            output = flex(
                *args[:3],
                score_mod=lambda s, b, h, q, k: s * 2.0 + bias[b, h, q, k],
                block_mask=args[4],
                enable_gqa=True,
            )
            return gated(output, args[3])

        args = inputs()
        found = Captured(model)(*args, mask)
        stock = Captured(model, fuse=False)(*args, mask)
        assert counters["fusion_pass"] == {"fused": 1}
        keep = expected_keys(MASK_MODS["length"]) if hidden else None
        assert_close(found, exact(args, keep, bias, 2 / math.sqrt(D)), stock)


class TestMaskedRows:
    @pytest.mark.parametrize("way", ["mask_mod", "score_mod", "no blocks"])
    def test_a_row_without_a_live_key_is_zero(self, way: str) -> None:
        lengths = torch.tensor([0, 9])
        args = inputs()
        if way == "score_mod":
            model = scored(lambda s, b, h, q, k: torch.where(k < lengths[b], s, -math.inf))
        else:
            none = torch.tensor([[[0]], [[1]]], dtype=torch.int32)
            all_keys = torch.zeros(B, 1, 1, 1, dtype=torch.int32)
            mask = (
                block_mask(lambda b, h, q, k: k < lengths[b])
                if way == "mask_mod"
                else from_kv_blocks(none, all_keys, BLOCK_SIZE=64, seq_lengths=(1, S))
            )

            def model(*args: Any) -> Tensor:
                return masked(*args, mask)

        found = Captured(model)(*args)
        assert counters["fusion_pass"] == {"fused": 1}
        assert (found[0] == 0).all()
        assert (found[1] != 0).all()

    @pytest.mark.parametrize("fill", [-1e9, -65504.0, torch.finfo(torch.float32).min])
    @pytest.mark.parametrize("added", [False, True])
    def test_a_finite_fill_gives_the_mean(self, fill: float, added: bool) -> None:
        lengths = torch.tensor([0, 9])

        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if added:
                return s + torch.where(k < lengths[b], 0.0, fill)
            return torch.where(k < lengths[b], s, fill)

        args = inputs()
        found = Captured(scored(score_mod))(*args)
        assert counters["fusion_pass"] == {"fused": 1}
        stock = Captured(scored(score_mod), fuse=False)(*args)
        torch.testing.assert_close(found, stock, rtol=1e-2, atol=1e-3)
        if not added:
            value = args[2].repeat_interleave(H // KV, 1)
            mean = gated(value.mean(2, keepdim=True)[:1], args[3][:1])
            torch.testing.assert_close(found[:1], mean)
        assert not torch.allclose(found[0], torch.zeros(()))


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
TABLE = torch.linspace(-1, 1, S)

SCORE_NEAR_MISSES: dict[str, Mod] = {
    "softcap": lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0),
    "alibi": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "squared": lambda s, b, h, q, k: s * s,
    "tensor-scale": lambda s, b, h, q, k: s * SLOPES[h],
    "inverse": lambda s, b, h, q, k: 1.0 / (s + 5.0),
    "shifted": lambda s, b, h, q, k: torch.where(s > 0, s, -math.inf),
    "distance": lambda s, b, h, q, k: s - k,
    "zero": lambda s, b, h, q, k: s * 0.0,
    "small-fill": lambda s, b, h, q, k: torch.where(k < 9, s, -100.0),
    "two-scores": lambda s, b, h, q, k: torch.where(k < 9, s, s * 2.0),
    "scaled-bias": lambda s, b, h, q, k: (s + TABLE[k]) * 2.0,
    "two-biases": lambda s, b, h, q, k: s + TABLE[k] + SLOPES[h],
    "bias-in-mask": lambda s, b, h, q, k: torch.where(k < 9, s, -1e9) + TABLE[k],
    "clamped": lambda s, b, h, q, k: s.clamp(-0.5, 0.5),
    "negative-scale-of-mask": lambda s, b, h, q, k: -1.0 * torch.where(k < 9, s, -math.inf),
    "two-fills": lambda s, b, h, q, k: torch.where(k < 9, torch.where(k > 3, s, -math.inf), -1e9),
}

MASK_NEAR_MISSES: dict[str, Mod] = {
    "floating-arithmetic": lambda b, h, q, k: k * TABLE[k] * 0.3 < 0.1,
    "slice": lambda b, h, q, k: ALIVE[b, h].sum() > k,
    "true-division": lambda b, h, q, k: k / 2 < 5,
}


class TestDeclines:
    def unchanged(self, model: Model, args: tuple[Any, ...], reason: str) -> None:
        step = Captured(model)
        found, stock = step(*args), Captured(model, fuse=False)(*args)
        assert counters["fusion_pass"] == {"declined": 1, f"declined: {reason}": 1}
        assert step.reason == reason
        torch.testing.assert_close(found, stock, rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("name", SCORE_NEAR_MISSES)
    def test_score_mods(self, name: str) -> None:
        self.unchanged(scored(SCORE_NEAR_MISSES[name]), inputs(), "score-mod")

    @pytest.mark.parametrize("name", MASK_NEAR_MISSES)
    def test_mask_mods(self, name: str) -> None:
        mask = block_mask(MASK_NEAR_MISSES[name], 1, H)
        self.unchanged(masked, (*inputs(), mask), "mask-mod")

    def test_finite_fill_beside_a_block_mask(self) -> None:
        def model(*args: Any) -> Tensor:
            output = flex(
                *args[:3],
                score_mod=lambda s, b, h, q, k: torch.where(k < 9, s, -1e9),
                block_mask=args[4],
                enable_gqa=True,
            )
            return gated(output, args[3])

        self.unchanged(model, (*inputs(), block_mask(MASK_MODS["length"])), "mask-fill")

    @pytest.mark.parametrize(
        "options", [{"SKIP_MASK_SCORE": True}, {"fwd_SOMETHING": 1}, {"BACKEND": "FLASH"}]
    )
    def test_kernel_options(self, options: dict[str, Any]) -> None:
        self.unchanged(scored(kernel_options=options), inputs(), "kernel-option")

    def test_statistics_that_are_used(self) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Any:
            output, aux = flex(query, key, value, enable_gqa=True, return_aux=AuxRequest(lse=True))
            return gated(output, gate) + aux.lse.sum()

        self.unchanged(model, inputs(), "softmax-statistics-used")

    def test_no_gate(self) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Any:
            return flex(query, key, value, enable_gqa=True) + gate.sum()

        self.unchanged(model, inputs(), "no-gate")


@pytest.mark.parametrize("options", [{"PRESCALE_QK": True}, {"fwd_BLOCK_N": 32}, {"bwd_ANY": 1}])
def test_options_that_say_how_and_not_what(options: dict[str, Any]) -> None:
    args = inputs()
    found = Captured(scored(kernel_options=options))(*args)
    assert counters["fusion_pass"] == {"fused": 1}
    torch.testing.assert_close(found.double(), exact(args), rtol=1e-4, atol=1e-5)


def test_a_growing_cache_compiles_as_often_as_without_the_pass() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, lengths: Tensor) -> Tensor:
        size = key.shape[2]
        mask = create_block_mask(
            lambda b, h, q, k: (k < lengths[b]) & (k + 3 > size - lengths[b]),
            query.shape[0],
            None,
            1,
            size,
            device="cpu",
        )
        return masked(query, key, value, gate, mask)

    compiles = {}
    for fuse in (True, False):
        torch._dynamo.reset()
        step = Captured(model, fuse)
        for size in (150, 151, 200, 300):
            query, _, _, gate = counting()
            key, lengths = torch.zeros(B, KV, size, D), torch.tensor([size // 2 + 2, size])
            value = torch.eye(size, D).expand(B, KV, size, D)
            found = attended_keys(step(query, key, value, gate, lengths))
            at = torch.arange(S)
            keep = (at < lengths[:, None]) & (at + 3 > size - lengths[:, None])
            assert torch.equal(found, keep[:, None, None].expand(B, H, 1, S))
        compiles[fuse] = len(step.graphs)
    assert compiles[True] == compiles[False] <= 3
    assert counters["fusion_pass"] == {"fused": compiles[True]}


@torch.no_grad()
def test_compiled_whole() -> None:
    """In the code that Inductor makes of it, and with the keys that Inductor's own kernel sees."""
    counts = torch.tensor([[[1]], [[2]]], dtype=torch.int32)
    blocks = torch.tensor([[[[1, 0, 2]]], [[[0, 2, 1]]]], dtype=torch.int32)
    full = torch.tensor([[[1]], [[0]]], dtype=torch.int32)
    size = 300
    documents = torch.arange(B * size).reshape(B, size) // 9 % 2
    mask = from_kv_blocks(
        counts,
        blocks,
        full,
        torch.tensor([[[[2, 1, 0]]], [[[1, 0, 2]]]], dtype=torch.int32),
        BLOCK_SIZE=128,
        mask_mod=lambda b, h, q, k: documents[b, k] == h % 2,
        seq_lengths=(1, size),
    )
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(B, H, 1, 32, generator=generator)
    key, value = (torch.randn(B, KV, size, 32, generator=generator) for _ in range(2))
    gate = torch.randn(B, 1, H * 32, generator=generator)
    options: dict[str, Any] = {"epilogue_fusion": False}
    stock = torch.compile(masked, options=options)(query, key, value, gate, mask)
    torch._dynamo.reset()
    step = torch.compile(masked, backend="fusion_pass", options=options | OPTIONS)
    found = step(query, key, value, gate, mask)
    assert counters["fusion_pass"] == {"fused": 1}
    torch.testing.assert_close(found, stock)
    torch._dynamo.reset()
    dense = Captured(masked, fuse=False)(query, key, value, gate, mask)
    assert not torch.allclose(dense, stock)


def on_gpu(graph: Graph) -> GraphModule:
    """A captured graph as if it were of CUDA tensors; no such trace is possible without CUDA."""
    mode = fake_mode()

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        with mode:
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="cuda"
            )

    module = graph.owning_module
    assert module is not None
    for part in (module, *module.children()):
        assert isinstance(part, GraphModule)
        for node in part.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map(moved, node.meta["val"])
            if "device" in node.kwargs:
                node.update_kwarg("device", torch.device("cuda"))
    return module


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("fill", "row"),
    [(-math.inf, -math.inf), (-1e9, LOWEST_IN_BASE_2), (torch.finfo(torch.float32).min, -math.inf)],
)
def test_on_a_gpu_graph(fill: float, row: float) -> None:
    """There a bias of finfo.min overflows to -inf, as it does with the other attentions."""
    step = Captured(scored(lambda s, b, h, q, k: torch.where(k < LENGTHS[b], s, fill)), fuse=False)
    step(*inputs())
    module = on_gpu(step.graphs[0])
    assert run_pass(module) == 1
    (fused,) = fused_nodes(module.graph)
    assert fused.kwargs["mask_fill"] == row
    assert fused.kwargs["numerics"] == "fp32"
    assert all(node.meta["val"].device.type == "cuda" for node in fused.all_input_nodes)
