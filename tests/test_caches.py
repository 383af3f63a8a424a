"""Inductor's caches: a changed setting or source is never served old code, an equal one is.

The processes share one cache folder and run copies of the package, so that a source can be changed.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import fusion_pass
from fusion_pass import GatedAttentionPass, config, graph_pass, inductor, patterns, rewrite
from fusion_pass.inductor import PassChain
from fusion_pass.paged import check as paged_check

CPU = {"devices": ["cpu"]}
STATES: dict[str, dict[str, Any]] = {
    "off": CPU | {"enabled": False},
    "on": CPU,
    "eager": CPU | {"numerics": "eager"},
    "fp32": CPU | {"numerics": "fp32"},
    "never": CPU | {"policy": "never"},
    "both devices": {"devices": ["cuda", "cpu"]},
    "other device": {"devices": ["cuda"]},
}
FUSED = ("on", "eager", "fp32", "both devices")

PROGRAM = """
import hashlib, json, sys
from pathlib import Path
import torch, torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

task = json.loads(sys.argv[1])

def gated(query, key, value, gate):
    output = F.scaled_dot_product_attention(query, key, value)
    return output.transpose(1, 2).reshape(2, 1, 64) * torch.sigmoid(gate)

generator = torch.Generator().manual_seed(0)
sizes = (2, 4, 1, 16), (2, 4, 40, 16), (2, 4, 40, 16), (2, 1, 64)
operands = [torch.randn(size, generator=generator).bfloat16() for size in sizes]

def digest(tensor):
    return hashlib.sha256(tensor.float().numpy().tobytes()).hexdigest()[:16]

def observe(compile):
    torch._dynamo.reset()
    counters.clear()
    step = compile(gated)
    step(*operands)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        result = step(*operands)
    names = [event.name for event in profiled.events()]
    return {
        "inductor": [counters["inductor"][f"fxgraph_cache_{x}"] for x in ("hit", "miss")],
        "autograd": [counters["aot_autograd"][f"autograd_cache_{x}"] for x in ("hit", "miss")],
        "rewritten": counters["fusion_pass"]["fused"],
        "calls": names.count("fusion_pass::gated_decode_attention"),
        "result": digest(result),
    }

answer = {}
with torch.no_grad():
    if task["adapter"]:
        from fusion_pass import register_attention
        register_attention(torch.ops.aten.erfinv.default, lambda node: None)
    if task["load"]:
        torch.compiler.load_cache_artifacts(Path(task["load"]).read_bytes())
    if task["stock first"]:
        answer["stock"] = observe(torch.compile)
        answer["imported"] = "fusion_pass" in sys.modules
        try:
            torch.export.load(task["program"])
            answer["loaded"] = True
        except RuntimeError:
            answer["loaded"] = False
    import fusion_pass
    from fusion_pass.ops import gated_decode_attention as operator

    for name, settings in task["states"].items():
        settings["devices"] = tuple(settings["devices"])
        options = {f"fusion_pass.{field}": value for field, value in settings.items()}
        answer[name] = observe(
            lambda step: torch.compile(step, backend="fusion_pass", options=options)
        )
    query, key, value, gate = operands
    gate = gate.view(2, 1, 4, 16)
    answer["operator"] = {
        numerics: digest(operator(query, key, value, gate, None, scale=0.25, numerics=numerics))
        for numerics in ("compiled", "eager", "fp32")
    }
    answer["uuid"] = repr(fusion_pass.GatedAttentionPass(devices=("cpu",)).uuid())
    answer["folder"] = str(Path(fusion_pass.__file__).parent.parent)
    if task["program"] and not Path(task["program"]).exists():
        class Module(torch.nn.Module):
            def forward(self, *operands):
                return operator(*operands, None, scale=0.25)
        torch.export.save(torch.export.export(Module(), (*operands[:3], gate)), task["program"])
    if task["save"]:
        Path(task["save"]).write_bytes(torch.compiler.save_cache_artifacts()[0])
print("\\n" + json.dumps(answer))
"""


class World:
    """A folder with copies of the package and the caches that its processes share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.artifacts = folder / "artifacts"
        self.program = folder / "program.pt2"

    def package(self, name: str) -> Path:
        """A copy of the installed package, laid out as a wheel has it."""
        root = self.folder / name
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(self.folder / "original", root, ignore=ignore)
        return root

    def run(
        self,
        root: Path,
        *states: str,
        caches: str = "caches",
        load: bool = False,
        save: bool = False,
        stock_first: bool = False,
        adapter: bool = False,
    ) -> dict[str, Any]:
        """What a new process with the package in `root` sees in each state in turn."""
        task = {
            "states": {name: STATES[name] for name in states},
            "load": str(self.artifacts) if load else None,
            "save": str(self.artifacts) if save else None,
            "program": str(self.program),
            "stock first": stock_first,
            "adapter": adapter,
        }
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FUSION_PASS")}
        environment |= {
            "PYTHONPATH": str(root),
            "PYTHONHASHSEED": str(len(root.name)),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / caches),
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
            # Making them costs more than all that is compiled here.
            "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
            "OMP_NUM_THREADS": "1",
        }
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(task)],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        assert answer["folder"] == str(root)
        return answer | {"stderr": result.stderr}


def served(seen: dict[str, Any]) -> str:
    """Whether a compile was answered from both caches ("hit") or from neither ("miss")."""
    assert seen["inductor"] == seen["autograd"], seen
    return {(1, 0): "hit", (0, 1): "miss"}[tuple(seen["inductor"])]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = World(tmp_path_factory.mktemp("caches"))
    ignore = shutil.ignore_patterns("__pycache__")
    package = made.folder / "original" / "fusion_pass"
    shutil.copytree(Path(fusion_pass.__file__).parent, package, ignore=ignore)
    source = Path(patterns.__file__ or "").parent
    shutil.copytree(source, package / "patterns", ignore=ignore, dirs_exist_ok=True)
    return made


@pytest.fixture(scope="module")
def cold(world: World) -> dict[str, Any]:
    """The first process; it starts with empty caches and tries every state."""
    return world.run(world.package("cold"), *STATES, save=True)


@pytest.fixture(scope="module")
def warm(world: World, cold: dict[str, Any]) -> dict[str, Any]:
    """The second process: an equal package in another folder, other states before and after."""
    return world.run(world.package("another"), *reversed(STATES), stock_first=True)


def test_each_setting_gets_its_own_code(cold: dict[str, Any]) -> None:
    for name in STATES:
        # Switched off for this device and switched off are stock's graph, but not stock's key.
        assert served(cold[name]) == "miss"
        assert cold[name]["calls"] == cold[name]["rewritten"] == (name in FUSED)
    numerics = cold["operator"]
    assert len(set(numerics.values())) == 3
    assert cold["on"]["result"] == cold["both devices"]["result"] == numerics["compiled"]
    assert cold["eager"]["result"] == numerics["eager"]
    assert cold["fp32"]["result"] == numerics["fp32"]
    assert cold["off"]["result"] == cold["other device"]["result"] == cold["never"]["result"]


def test_equal_settings_are_served_from_the_caches(
    cold: dict[str, Any], warm: dict[str, Any]
) -> None:
    assert warm["uuid"] == cold["uuid"]
    for name in STATES:
        assert served(warm[name]) == "hit"
        # The pass did not run, and yet the operator does.
        assert warm[name]["rewritten"] == 0
        assert warm[name]["calls"] == (name in FUSED)
        assert warm[name]["result"] == cold[name]["result"]


def test_a_process_without_the_library_is_served_stock(warm: dict[str, Any]) -> None:
    assert not warm["imported"]
    assert served(warm["stock"]) == "hit"
    assert warm["stock"]["calls"] == 0
    assert warm["stock"]["result"] == warm["off"]["result"]


def test_a_program_with_the_operator_says_what_is_missing(warm: dict[str, Any]) -> None:
    assert not warm["loaded"]
    wanted = "We failed to resolve torch.ops.fusion_pass.gated_decode_attention"
    assert wanted in warm["stderr"]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kernels/gated_decode.py", "", "\n# touched\n"),
        ("__init__.py", f'"{fusion_pass.__version__}"', '"99.0"'),
    ],
    ids=["kernel-source", "version"],
)
def test_another_package_is_not_served_this_ones_code(
    file: str, old: str, new: str, world: World, cold: dict[str, Any]
) -> None:
    root = world.package(file.replace("/", "-"))
    path = root / "fusion_pass" / file
    text = path.read_text()
    path.write_text(text.replace(old, new) if old else text + new)
    seen = world.run(root, "on", "off")
    assert seen["uuid"] != cold["uuid"]
    assert served(seen["on"]) == "miss"
    assert seen["on"]["calls"] == seen["on"]["rewritten"] == 1
    assert served(seen["off"]) == "hit"
    assert seen["off"]["result"] == cold["off"]["result"]


def test_a_registered_adapter_is_not_served_the_code_without_it(
    world: World, cold: dict[str, Any]
) -> None:
    seen = world.run(world.package("adapter"), "on", adapter=True)
    assert seen["uuid"] != cold["uuid"]
    assert served(seen["on"]) == "miss"
    assert seen["on"]["calls"] == 1


def test_saved_artifacts_serve_another_machine(world: World, cold: dict[str, Any]) -> None:
    states = ("on", "off", "eager")
    root = world.package("mega")
    seen = world.run(root, *states, caches="elsewhere", load=True, stock_first=True)
    # Before the library is imported, its artifacts are there and serve nobody.
    assert not seen["imported"]
    assert (seen["stock"]["calls"], seen["stock"]["result"]) == (0, cold["off"]["result"])
    for name in states:
        assert served(seen[name]) == "hit"
        assert seen[name]["calls"] == (name in FUSED)
        assert seen[name]["result"] == cold[name]["result"]


# The identity of a pass, without processes.


@pytest.fixture
def package(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the package that `source_digest` reads instead of the installed one."""
    root = world.package("digest") / "fusion_pass"
    monkeypatch.setattr(rewrite, "__file__", str(root / "rewrite.py"))
    monkeypatch.setattr(patterns, "__file__", str(root / "patterns" / "__init__.py"))
    yield root
    shutil.rmtree(root.parent)
    graph_pass.source_digest.cache_clear()


def digest() -> str:
    graph_pass.source_digest.cache_clear()
    return graph_pass.source_digest()


def test_the_identity_covers_every_source_file(package: Path) -> None:
    sources = sorted(path for path in package.rglob("*") if path.is_file())
    names = {path.name for path in sources}
    assert {"gated_decode.py", "ops.py", "attention.py", "store.py", "page.html"} <= names
    digests = {digest()}
    for path in sources:
        path.write_bytes(path.read_bytes() + b"\n")
        digests.add(digest())
    assert len(digests) == 1 + len(sources)
    before = digest()
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "ops.pyc").write_bytes(b"compiled")
    assert digest() == before
    (package / "ops.py").rename(package / "kernels" / "ops.py")
    assert digest() != before


def test_the_identity_covers_torch_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    own = GatedAttentionPass(devices=("cpu",)).uuid()
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert GatedAttentionPass(devices=("cpu",)).uuid() != own
    monkeypatch.undo()
    monkeypatch.setattr(inductor, "triton_version", lambda: "99.0")
    assert GatedAttentionPass(devices=("cpu",)).uuid() != own


def test_the_identity_covers_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are not the current one: a graph may run on any of them."""
    gpus = [
        SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132),
        SimpleNamespace(name="NVIDIA L4", major=8, minor=9, multi_processor_count=58),
    ]

    def identity(devices: tuple[str, ...]) -> Any:
        graph_pass.visible_gpus.cache_clear()
        return GatedAttentionPass(devices=devices).uuid()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    cuda, cpu = identity(("cuda",)), identity(("cpu",))
    gpus.reverse()
    assert identity(("cuda",)) != cuda
    assert identity(("cpu",)) == cpu
    graph_pass.visible_gpus.cache_clear()


def test_a_forked_process_that_cannot_ask_for_the_gpus_still_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(index: int) -> Any:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    graph_pass.visible_gpus.cache_clear()
    # None switches the caches off: what the code depends on is not known.
    assert GatedAttentionPass().uuid() is None
    assert GatedAttentionPass(devices=("cpu",)).uuid() is not None
    graph_pass.visible_gpus.cache_clear()


def test_what_is_only_told_switches_the_caches_off() -> None:
    # None switches the caches off: what is told must not depend on what they hold.
    for told in ({"dump": "folder"}, {"log": "debug"}):
        assert GatedAttentionPass(devices=("cpu",), **told).uuid() is None
    assert set(config.Config.__dataclass_fields__) == {
        "enabled",
        "devices",
        "numerics",
        "policy",
        "table",
        "dump",
        "log",
        "strict",
    }


@pytest.mark.parametrize("text", ["1", "on"])
def test_the_identity_covers_the_check_of_indices(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled with it checks, and what is compiled without does not."""
    monkeypatch.delenv(paged_check.VARIABLE, raising=False)
    own = GatedAttentionPass(devices=("cpu",)).uuid()
    monkeypatch.setenv(paged_check.VARIABLE, text)
    assert GatedAttentionPass(devices=("cpu",)).uuid() != own
    monkeypatch.setenv(paged_check.VARIABLE, "0")
    assert GatedAttentionPass(devices=("cpu",)).uuid() == own


def test_a_pass_travels_to_a_compile_worker() -> None:
    for sent in (GatedAttentionPass(devices=("cpu",)), PassChain(GatedAttentionPass())):
        received = pickle.loads(pickle.dumps(sent))
        assert received.uuid() == sent.uuid()


# One process that changes its mind.


def gated(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    output = F.scaled_dot_product_attention(query, key, value)
    return output.transpose(1, 2).reshape(2, 1, 64) * torch.sigmoid(gate)


@pytest.fixture
def operands() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    sizes = (2, 4, 1, 16), (2, 4, 40, 16), (2, 4, 40, 16), (2, 1, 64)
    return tuple(torch.randn(size, generator=generator) for size in sizes)


def rewritten(step: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> int:
    before = counters["fusion_pass"]["fused"]
    with torch.no_grad():
        torch.testing.assert_close(step(*operands), gated(*operands))
    return int(counters["fusion_pass"]["fused"]) - before


def test_a_pass_without_an_identity_switches_the_caches_off(
    operands: tuple[Tensor, ...],
) -> None:
    ours = GatedAttentionPass(devices=("cpu",))
    with (
        fresh_cache(),
        torch._inductor.config.patch(fx_graph_cache=True),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        for slot, fused in ((PassChain(lambda graph: None, ours), [1, 1]), (ours, [1, 0])):
            found = []
            for _ in range(2):
                torch._dynamo.reset()
                step = torch.compile(gated, options={inductor.SLOT: slot})
                found.append(rewritten(step, operands))
            assert found == fused


def test_enable_does_not_reach_what_is_compiled_until_a_reset(
    operands: tuple[Tensor, ...],
) -> None:
    step = torch.compile(gated)
    assert rewritten(step, operands) == 0
    with fusion_pass.enable(devices=("cpu",)):
        assert rewritten(step, operands) == 0
        torch.compiler.reset()
        assert rewritten(step, operands) == 1


def test_other_options_need_no_reset(operands: tuple[Tensor, ...]) -> None:
    stock = torch.compile(gated)
    fused = torch.compile(gated, backend="fusion_pass", options={"fusion_pass.devices": ("cpu",)})
    unfused = torch.compile(
        gated, backend="fusion_pass", options={"fusion_pass.devices": ("cuda",)}
    )
    found = [rewritten(step, operands) for step in (stock, fused, unfused, fused)]
    assert found[:3] == [0, 1, 0]
    assert counters["fusion_pass"]["declined: device"] == 1


def test_the_switch_is_read_when_a_graph_is_compiled(
    operands: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = torch.compile(gated, backend="fusion_pass", options={"fusion_pass.devices": ("cpu",)})
    assert rewritten(step, operands) == 1
    monkeypatch.setenv("FUSION_PASS", "0")
    assert rewritten(step, operands) == 0
    torch.compiler.reset()
    assert rewritten(step, operands) == 0
    monkeypatch.delenv("FUSION_PASS")
    torch.compiler.reset()
    assert rewritten(step, operands) == 1
