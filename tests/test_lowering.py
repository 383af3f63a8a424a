"""What the lowering adds to Inductor's handling of a user's Triton kernel, without a GPU."""

from __future__ import annotations

import inspect
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.ir import UserDefinedTritonKernel
from torch._inductor.runtime import triton_heuristics

from fusion_pass import lowering
from fusion_pass.launch import Launch


class Wrapper:
    """Stands in for Inductor's wrapper: keeps what is defined."""

    def __init__(self) -> None:
        self.defined: list[tuple[Any, ...]] = []

    def define_kernel(self, *definition: Any, **options: Any) -> None:
        self.defined.append((*definition, options))


@pytest.mark.parametrize("dependent", [False, True])
def test_a_kernel_has_its_label_and_asks_for_its_launch(
    dependent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "async_compile.triton('split', '@user_autotune(inductor_meta={'kernel_name': 'split_0'}, "
        "triton_meta={'signature': {}})\ndef split(query): split_0')"
    )

    def codegen(self: Any, wrapper: Any) -> None:
        wrapper.define_kernel("split_0", source, "# path", gpu=True)

    def split() -> None: ...

    monkeypatch.setattr(UserDefinedTritonKernel, "codegen", codegen)
    wrapper: Any = Wrapper()
    kernel = object.__new__(lowering._labelled_kernel())
    kernel.launch = Launch(split, (), {}, 4, 1, "split_d256_bf16", ("output",), dependent)
    kernel.codegen(wrapper)
    asked = source.replace("'split'", "'split_d256_bf16'").replace(
        "def split(", "def split_d256_bf16("
    )
    if dependent:
        asked = asked.replace("{'signature'", "{'launch_pdl': True, 'signature'")
    assert wrapper.defined == [("split_0", asked, "# path", {"gpu": True})]
    assert "define_kernel" not in vars(wrapper)


def test_inductor_writes_the_metadata_where_it_is_looked_for() -> None:
    """The replaced text is Inductor's own: this tells when another version spells it otherwise."""
    source = inspect.getsource(PythonWrapperCodegen.define_user_defined_triton_kernel)
    assert re.search(r"triton_meta=\{(sanitized_)?triton_meta!r\}", source)
    assert "self.define_kernel(" in source
    heuristics = inspect.getsource(triton_heuristics)
    assert '"launch_pdl": compile_meta.get("launch_pdl", False)' in heuristics


def test_what_inductor_asks_is_put_back_after_two_threads() -> None:
    def asked() -> Any:
        return getattr(triton_kernel_wrap, lowering.analysis_name())

    before, inside, leave = asked(), threading.Event(), threading.Event()
    steps: list[Any] = [SimpleNamespace(kernel=object(), writes=(), arguments={}) for _ in range(2)]

    def first() -> None:
        with lowering._writes_known(steps[0]):
            inside.set()
            assert leave.wait(10)

    def second() -> None:
        assert inside.wait(10)
        with lowering._writes_known(steps[1]):
            assert asked()(steps[1].kernel, {}, {}) is not None

    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(first), pool.submit(second)]
        # The second is given the time to come as far as it can.
        time.sleep(0.1)
        leave.set()
        for end in ends:
            end.result(10)
    assert asked() is before
