"""`explain` changes nothing: not what closures, globals and hooks reach, nor torch's state."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fusion_pass
from fusion_pass import assert_fused, explain

B, H, S, D = 2, 4, 48, 32


class Cache:
    """Makes room for its keys when it is first used, as caches of the field do."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.calls: list[int] = []

    def update(self, keys: Tensor) -> Tensor:
        if self.keys is None:
            self.keys = torch.zeros(keys.shape, dtype=keys.dtype)
        self.calls.append(1)
        return self.keys + keys


class Attention(nn.Module):
    """A gated attention of its arguments, scaled by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor, gate: Tensor) -> Any:
        return program(query * self.scale, key, value, keep, gate)


class Broken(Attention):
    """In two graphs."""

    def forward(self, *operands: Tensor) -> Any:
        first = super().forward(*operands)
        torch._dynamo.graph_break()
        return super().forward(*operands) + first


def program(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, gate: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=keep) * torch.sigmoid(gate)


def inputs() -> tuple[Tensor, ...]:
    sizes = ((B, H, 1, D), (B, H, S, D), (B, H, S, D))
    query, key, value = (torch.zeros(size, dtype=torch.bfloat16) for size in sizes)
    keep = torch.ones(B, 1, 1, S, dtype=torch.bool)
    return query, key, value, keep, torch.zeros(B, H, 1, D, dtype=torch.bfloat16)


CACHE = Cache()
MODEL = Attention()
SEEN: list[Tensor] = []
LATEST: Tensor | None = None
LOCK = threading.Lock()


def with_a_global_cache(query: Tensor, key: Tensor, *rest: Tensor) -> Tensor:
    return program(query, CACHE.update(key), *rest)


def with_globals_in_a_helper(*operands: Tensor) -> Tensor:
    def note(output: Tensor) -> Tensor:
        global LATEST
        LATEST = output
        SEEN.append(output)
        return output

    with LOCK:
        return note(MODEL(*operands))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield


class TestObjects:
    def test_a_global_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CACHE, "keys", None)
        monkeypatch.setattr(CACHE, "calls", [])
        assert_fused(with_a_global_cache, *inputs(), device="cuda", expected=1)
        assert CACHE.keys is None
        assert CACHE.calls == []
        compiled = torch.compile(with_a_global_cache, dynamic=False)
        assert compiled(*inputs()).shape == (B, H, 1, D)
        assert type(CACHE.keys) is Tensor

    def test_a_closed_over_cache_in_a_decorated_function(self) -> None:
        cache = Cache()

        @torch.no_grad()
        def step(query: Tensor, key: Tensor, *rest: Tensor) -> Tensor:
            return program(query, cache.update(key), *rest)

        assert_fused(step, *inputs(), device="cuda", expected=1)
        assert cache.keys is None
        assert cache.calls == []
        assert torch.compile(step, backend="eager")(*inputs()).shape == (B, H, 1, D)

    def test_globals_that_an_inner_function_changes(self) -> None:
        assert_fused(with_globals_in_a_helper, *inputs(), device="cuda", expected=1)
        assert SEEN == []
        assert LATEST is None
        assert type(MODEL.scale.data) is Tensor

    def test_a_cell_that_two_functions_share(self) -> None:
        count = 0

        def first(output: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return output + count

        def step(*operands: Tensor) -> Tensor:
            return first(program(*operands)) if count == 0 else operands[0]

        assert_fused(step, *inputs(), device="cuda", expected=1)
        assert count == 0

    def test_what_is_compiled_inside_is_not(self) -> None:
        @torch.compiler.disable
        def apart(operand: Tensor) -> Tensor:
            return operand + 1

        function, module = torch.compile(program), torch.compile(Attention())

        def step(query: Tensor, *rest: Tensor) -> Tensor:
            return function(apart(query), *rest) + module(apart(query), *rest)

        assert_fused(step, *inputs(), device="cuda", expected=2)

    def test_defaults_and_a_bound_self(self) -> None:
        class Holder:
            def __init__(self) -> None:
                self.seen: list[Tensor] = []

            def step(self, *operands: Tensor, into: list[Tensor] = SEEN) -> Tensor:
                into.append(operands[0])
                self.seen.append(operands[0])
                return program(*operands)

        holder = Holder()
        assert_fused(holder.step, *inputs(), device="cuda", expected=1)
        assert (holder.seen, SEEN) == ([], [])

    @pytest.mark.parametrize("is_closed_over", [False, True])
    def test_a_forward_hook(self, *, is_closed_over: bool) -> None:
        model, outputs = Attention(), []
        model.register_forward_hook(lambda *call: outputs.append(call[2]))
        step = (lambda *operands: model(*operands)) if is_closed_over else model
        assert_fused(step, *inputs(), device="cuda", expected=1)
        assert outputs == []

    def test_what_a_method_reaches_by_itself_is_put_back_and_named(self) -> None:
        class Counting:
            def step(self, *operands: Tensor) -> Tensor:
                return self.inner(*operands)

            def inner(self, *operands: Tensor) -> Tensor:
                output = program(*operands)
                SEEN.append(output)
                return output

        with pytest.raises(TypeError, match="from changing the global SEEN"):
            explain(Counting().step, *inputs(), device="cuda")
        assert SEEN == []

    def test_a_class_attribute_is_put_back_and_named(self) -> None:
        class Keeping(Attention):
            kept: list[Tensor] = []  # noqa: RUF012

            def forward(self, *operands: Tensor) -> Any:
                output = program(*operands)
                self.kept.append(output)
                return output

        with pytest.raises(TypeError, match=r"from changing Keeping\.kept"):
            explain(Keeping(), *inputs(), device="cuda")
        assert Keeping.kept == []


class TestDynamo:
    @pytest.mark.parametrize("kind", [Attention, Broken])
    def test_a_compile_after_many_fuses(self, kind: type[Attention]) -> None:
        count = 2 if kind is Broken else 1
        for _ in range(12):
            assert_fused(kind(), *inputs(), device="cuda", expected=count)
        assert not counters
        with fusion_pass.enable(devices=("cpu",), policy="always"):
            torch.compile(kind())(*inputs())
        assert dict(counters["fusion_pass"]) == {"fused": count}

    def test_functions_with_graph_breaks(self) -> None:
        def step(*operands: Tensor) -> Tensor:
            first = inner(*operands)
            return inner(*operands) + first

        def inner(*operands: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return program(*operands)

        for _ in range(10):
            found = explain(step, *inputs(), device="cuda").fused
        assert found >= 1
        with fusion_pass.enable(devices=("cpu",), policy="always"):
            torch.compile(step)(*inputs())
        assert counters["fusion_pass"]["fused"] == found

    def test_sizes_that_were_explained_do_not_become_symbolic(self) -> None:
        explain(program, *inputs(), device="cuda")
        query, key, value, keep, gate = inputs()
        seen: list[torch.fx.GraphModule] = []

        def backend(module: torch.fx.GraphModule, _: Any) -> Any:
            seen.append(module)
            return module.forward

        longer = query, key[:, :, 1:], value[:, :, 1:], keep[..., 1:], gate
        torch.compile(program, backend=backend)(*longer)
        (graph,) = seen
        fakes = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        assert all(isinstance(size, int) for fake in fakes for size in fake.shape)

    def test_what_was_compiled_before_stays(self) -> None:
        compiles = []

        def backend(module: torch.fx.GraphModule, _: Any) -> Any:
            compiles.append(module)
            return module.forward

        compiled = torch.compile(Attention(), backend=backend)
        compiled(*inputs())
        before = {name: dict(counter) for name, counter in counters.items()}
        explain(compiled, *inputs(), device="cuda")
        assert {name: dict(counter) for name, counter in counters.items()} == before
        compiled(*inputs())
        assert len(compiles) == 1


class TestTorch:
    def test_random_state_and_modes(self) -> None:
        def step(*operands: Tensor) -> Tensor:
            torch.manual_seed(3)
            random.seed(3)
            torch.set_grad_enabled(True)
            return program(*operands)

        torch.manual_seed(7)
        random.seed(7)
        before, python = torch.get_rng_state(), random.getstate()
        explain(step, *inputs(), device="cuda")
        assert torch.equal(torch.get_rng_state(), before)
        assert random.getstate() == python
        assert not torch.is_grad_enabled()

    def test_inside_a_compiled_function(self) -> None:
        def step(*operands: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            explain(program, *operands)
            return program(*operands)

        with pytest.raises(TypeError, match="inside a compiled function; call it outside"):
            torch.compile(step, backend="eager")(*inputs())

    def test_a_generator(self) -> None:
        with pytest.raises(TypeError, match=r"a torch\.Generator among the arguments"):
            explain(program, *inputs()[:-1], torch.Generator())

    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    @pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
    def test_a_nested_tensor(self, layout: torch.layout) -> None:
        nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=layout)
        with pytest.raises(TypeError, match="a nested tensor among the arguments"):
            explain(program, nested)


_FIRST = """
import torch, fusion_pass
cache = []
def step(x):
    cache.append(x * 2)
    return cache[-1]
fusion_pass.explain(step, torch.zeros(2))
assert cache == []
"""


def test_the_first_graph_of_a_process_may_be_any() -> None:
    subprocess.run([sys.executable, "-c", _FIRST], check=True, timeout=300)
