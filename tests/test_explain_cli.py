"""`python -m fusion_pass explain` on transformers models on disk, without weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from fusion_pass import explain_model
from fusion_pass.__main__ import main
from fusion_pass.explain_model import ModelError

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "layer_types": ["full_attention"] * 2,
    "dtype": "bfloat16",
}
SMALL = ("--batch", "2", "--capacity", "512", "--layers", "1", "--require-all")


@pytest.fixture(autouse=True)
def _modules_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies a model's code to here before it imports it."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.syspath_prepend(str(tmp_path / "hf"))


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    """A folder with the config of a small Qwen3.5, and nothing else."""
    folder = tmp_path / "qwen"
    transformers.Qwen3_5TextConfig(**SIZES).save_pretrained(folder)
    return folder


@pytest.fixture
def silu_gated(tmp_path: Path) -> Path:
    """A folder with a copy of Qwen3.5's code whose attention has a silu for its gate."""
    folder = tmp_path / "silu"
    config = transformers.Qwen3_5TextConfig(**SIZES)
    config.auto_map = {"AutoModelForCausalLM": "modeling_silu.Qwen3_5ForCausalLM"}
    config.save_pretrained(folder)
    module = transformers.models.qwen3_5.modeling_qwen3_5
    code = Path(module.__file__).read_text()
    assert code.count("attn_output * torch.sigmoid(gate)") == 1
    code = code.replace("torch.sigmoid(gate)", "nn.functional.silu(gate)")
    packages = ("transformers.models.qwen3_5", "transformers.models", "transformers")
    for dots, package in zip((r"\.", r"\.\.", r"\.\.\."), packages, strict=True):
        code = re.sub(rf"^from {dots}(?=\w)", f"from {package}.", code, flags=re.MULTILINE)
        code = re.sub(rf"^from {dots} import", f"from {package} import", code, flags=re.MULTILINE)
    (folder / "modeling_silu.py").write_text(code)
    return folder


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit status of the command, and what it prints."""
    status = main(["explain", *arguments])
    return status, capsys.readouterr().out


def test_qwen(qwen: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    status, printed = explained(
        capsys, "--model", str(qwen), *SMALL, "--query-tokens", "2", "--json", "--html", str(page)
    )
    assert status == 0
    data = json.loads(printed)
    ((site,),) = [graph for graph in data["graphs"] if graph]
    assert (data["fused"], data["gated"], site["module"]) == (1, 1, "model.layers.0.self_attn")
    assert site["tensors"]["query"]["shape"] == [2, 4, 2, 32]
    assert site["tensors"]["key"]["shape"] == [2, 2, 512, 32]
    assert site["tensors"]["key"]["dtype"] == "bfloat16"
    assert any("modeling_qwen3_5.py" in frame for frame in site["frames"])
    assert "1 of 1 gated attentions would be fused" in page.read_text()


def test_a_pass_that_is_switched_off_meets_no_demand(
    qwen: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSION_PASS", "0")
    status, printed = explained(capsys, "--model", str(qwen), *SMALL)
    assert status == 1
    assert "switched off: 0 fused; 1 would be" in printed


def test_an_html_file_in_no_folder_is_refused_at_once(
    qwen: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--model", str(qwen), "--html", str(tmp_path / "absent" / "page.html")])
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "layers", "said"),
    [
        ([], None, "holds a list, not the fields of a config"),
        ({}, None, "it has no model_type"),
        ({"model_type": 3}, None, "it has no model_type"),
        ({"model_type": "no such model"}, None, "knows no model_type 'no such model'"),
        ({"model_type": "qwen3_next", "hidden_size": "a"}, None, "transformers cannot read"),
        ({"model_type": "llama", "num_attention_heads": 0}, None, "transformers cannot read"),
        ({"model_type": "llama", "auto_map": ["x"]}, None, "is no table of the model's classes"),
        ({"auto_map": None}, None, "is no table of the model's classes"),
        ({"model_type": "llama", "vocab_size": -1}, None, "LlamaConfig cannot be built"),
        ({"model_type": "resnet"}, None, "no language model for ResNetConfig"),
        ({"model_type": "resnet"}, 1, "--layers 1 cannot be had: ResNetConfig does not count"),
        ({"model_type": "vit"}, 1, "no language model for ViTConfig"),
        ({"model_type": "musicgen"}, 1, "--layers 1 cannot be had"),
        ({"model_type": "qwen3_next"}, 2, "no layer with attention: the first is number 4"),
        ({"model_type": "mamba", "num_hidden_layers": 2}, None, "has no layer with attention"),
        ({"model_type": "llama", "num_key_value_heads": 3}, 1, "a decode step of the model fails"),
    ],
)
def test_a_config_that_makes_no_model_is_an_error_in_words(
    config: object,
    layers: int | None,
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    shortened = () if layers is None else ("--layers", str(layers))
    with pytest.raises(SystemExit) as exit_:
        main(["explain", "--model", str(tmp_path), *shortened])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error) < 500
    assert error.startswith("python -m fusion_pass explain: error: ")


def test_a_silu_gated_copy_of_qwen(silu_gated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a new user types: the first command says what the second must be, and that says why."""
    with pytest.raises(SystemExit):
        main(["explain", "--model", str(silu_gated)])
    assert "add --trust-remote-code" in capsys.readouterr().err
    status, printed = explained(capsys, "--model", str(silu_gated), *SMALL, "--trust-remote-code")
    assert status == 1
    assert "the gate is silu" in printed
    assert "expected: sigmoid(gate)" in printed
    (place,) = re.findall(r"at: (.*)", printed)
    code = (silu_gated / "modeling_silu.py").read_text().splitlines()
    lines = [code[int(line) - 1] for line in re.findall(r"modeling_silu\.py:(\d+)", place)]
    assert any("functional.silu(gate)" in line for line in lines)


def test_a_model_without_gates_meets_no_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "layer_types"}
    transformers.LlamaConfig(**sizes).save_pretrained(tmp_path / "llama")
    model = ("--model", str(tmp_path / "llama" / "config.json"))
    status, printed = explained(capsys, *model, *SMALL)
    assert status == 1
    assert "declined: no-gate" in printed
    assert "0 of 0 gated attentions would be fused; 1 without a gate" in printed


def test_a_step_that_fails_where_its_first_token_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "layer_types"}
    config = {**sizes, "model_type": "llama", "sliding_window": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as exit_:
        main(["explain", "--model", str(tmp_path), "--query-tokens", "16", "--capacity", "64"])
    assert exit_.value.code == 2
    assert "a decode step of the model fails, by itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "/no/such/folder"), "neither a folder with a config.json nor"),
        (("--model", ".", "--batch", "0"), "--batch 0: it must be at least 1"),
        (("--model", ".", "--query-tokens", "-1"), "--query-tokens -1"),
        (("--model", ".", "--query-tokens", "8", "--capacity", "8"), "no room for a step of 8"),
        ((), "--model"),
    ],
)
def test_bad_arguments(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["explain", *arguments])
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "python -m fusion_pass explain: error: " in printed


@pytest.mark.parametrize(
    "text",
    ["{}", "not json", '{"model_type": "no such model"}', '{"auto_map": {"AutoConfig": "m.X"}}'],
)
def test_a_file_that_is_no_config(text: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=r"settings\.json"):
        explain_model.read_config(path, False)


def test_a_config_file_of_another_name(qwen: Path) -> None:
    path = qwen / "small.json"
    (qwen / "config.json").rename(path)
    assert explain_model.read_config(path, False).head_dim == 32


def test_code_that_is_not_on_disk(qwen: Path) -> None:
    config = transformers.Qwen3_5TextConfig(**SIZES)
    config.auto_map = {"AutoModelForCausalLM": "some/where--modeling.Model"}
    with pytest.raises(ModelError, match="not in the folder"):
        explain_model.build(config, True)


def test_a_config_without_a_language_model() -> None:
    with pytest.raises(ModelError, match="no language model for ViTConfig"):
        explain_model.build(transformers.ViTConfig(), False)
