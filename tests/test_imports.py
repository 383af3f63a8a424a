"""What importing loads, and which module may import which."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fusion_pass
import fusion_pass.patterns

PACKAGE = Path(fusion_pass.__file__).parent
PATTERNS = Path(fusion_pass.patterns.__file__).parent


def run(program: str) -> str:
    """What `program` prints in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()


def imports(path: Path, package: str) -> Iterator[str]:
    """The full name of every module or member that the file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            module = importlib.util.resolve_name(base, package) if node.level else base
            yield from (f"{module}.{alias.name}" for alias in node.names)


def of(name: str, *packages: str) -> bool:
    """Whether `name` is one of `packages` or inside one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_import_is_light_and_registers_the_op() -> None:
    program = """
import sys, fusion_pass, torch
heavy = [name for name in ("triton", "torch._inductor", "torch._dynamo") if name in sys.modules]
print(heavy, torch.cuda.is_initialized(), torch.ops.fusion_pass.gated_decode_attention.default)
"""
    assert run(program) == "[] False fusion_pass.gated_decode_attention.default"


def test_the_pass_needs_no_cuda_initialised() -> None:
    program = """
import fusion_pass, torch
fusion_pass.GatedAttentionPass()
with fusion_pass.enable():
    pass
print(torch.cuda.is_initialized())
"""
    assert run(program) == "False"


@pytest.mark.parametrize("name", fusion_pass.__all__)
def test_exported_names_exist_and_are_listed(name: str) -> None:
    assert getattr(fusion_pass, name) is not None
    assert name in dir(fusion_pass)


def test_other_names_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        fusion_pass.no_such_name  # noqa: B018


def test_version_is_the_installed_one() -> None:
    assert importlib.metadata.version("fusion-pass") == fusion_pass.__version__


def test_patterns_import_torch_and_themselves_alone() -> None:
    for path in PATTERNS.glob("*.py"):
        for name in imports(path, "fusion_pass.patterns"):
            assert not of(name, "triton"), path
            assert not of(name, "fusion_pass") or of(name, "fusion_pass.patterns"), path


def test_reference_imports_torch_alone() -> None:
    for name in imports(PACKAGE / "reference.py", "fusion_pass"):
        assert of(name, "torch", *sys.stdlib_module_names), name


def test_kernels_import_nothing_of_the_package_but_themselves() -> None:
    for path in (PACKAGE / "kernels").glob("*.py"):
        for name in imports(path, "fusion_pass.kernels"):
            assert not of(name, "fusion_pass") or of(name, "fusion_pass.kernels"), path


def test_only_launches_import_kernels() -> None:
    importers = {
        str(path.relative_to(PACKAGE))
        for package in (PACKAGE, PACKAGE / "paged")
        for path in package.glob("*.py")
        for name in imports(path, ".".join(("fusion_pass", *path.relative_to(PACKAGE).parts[:-1])))
        if of(name, "fusion_pass.kernels")
    }
    assert importers == {"launch.py", "gate_mul_launch.py", "paged/launch.py"}


def test_the_scan_sees_every_kind_of_import(tmp_path: Path) -> None:
    source = "import a.b\nfrom c import d\ndef f():\n    from . import e\n    from ..g import h\n"
    (tmp_path / "module.py").write_text(source)
    assert list(imports(tmp_path / "module.py", "top.sub")) == [
        "a.b",
        "c.d",
        "top.sub.e",
        "top.g.h",
    ]
