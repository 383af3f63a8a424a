"""What the lowering adds to Inductor's handling of a user's Triton kernel, without a GPU."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.ir import UserDefinedTritonKernel
from torch._inductor.runtime import triton_heuristics

from fusion_pass import lowering


class Wrapper:
    """Stands in for Inductor's wrapper: keeps what is defined."""

    def __init__(self) -> None:
        self.defined: list[tuple[Any, ...]] = []

    def define_kernel(self, *definition: Any, **options: Any) -> None:
        self.defined.append((*definition, options))


def test_a_dependent_kernel_asks_for_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "@user_autotune(inductor_meta={'a': 1}, triton_meta={'signature': {}})"

    def codegen(self: Any, wrapper: Any) -> None:
        wrapper.define_kernel("name", source, "# path", gpu=True)

    monkeypatch.setattr(UserDefinedTritonKernel, "codegen", codegen)
    wrapper: Any = Wrapper()
    kernel = object.__new__(lowering._dependent_kernel())
    kernel.codegen(wrapper)
    asked = source.replace("{'signature'", "{'launch_pdl': True, 'signature'")
    assert wrapper.defined == [("name", asked, "# path", {"gpu": True})]
    assert "define_kernel" not in vars(wrapper)


def test_inductor_writes_the_metadata_where_it_is_looked_for() -> None:
    """The replaced text is Inductor's own: this tells when another version spells it otherwise."""
    source = inspect.getsource(PythonWrapperCodegen.define_user_defined_triton_kernel)
    assert re.search(r"triton_meta=\{(sanitized_)?triton_meta!r\}", source)
    assert "self.define_kernel(" in source
    heuristics = inspect.getsource(triton_heuristics)
    assert '"launch_pdl": compile_meta.get("launch_pdl", False)' in heuristics
