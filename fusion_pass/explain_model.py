"""`python -m fusion_pass explain`: a transformers model on disk, explained without its weights."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchRuntimeError
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_pass.explainer import explain
from fusion_pass.explanation import Explanation
from fusion_pass.tracing import without_data

_DEFAULT_DTYPE = torch.bfloat16
_WITHOUT_ATTENTION = {"linear_attention", "mamba", "recurrent", "conv", "moe"}
"""Kinds of layers, as configs call them, that have no attention over a cache of K and V."""
_UNKNOWN = "Unrecognized configuration class"
"""How transformers begins to say that a kind of model does not exist for a config."""
_STEP_FAILS = "a decode step of the model fails, by itself"
_LONGEST = 300
"""Characters of an error of transformers that are told: some list every model there is."""


class ModelError(ValueError):
    """A model cannot be built from what is on disk; the message says what to change."""


@dataclass(frozen=True)
class Step:
    """Sizes of a decode step: sequences, tokens that the static cache holds, tokens a sequence."""

    batch: int
    capacity: int
    query_tokens: int


def explain_model(
    path: Path,
    step: Step,
    *,
    device: str = "cuda",
    layers: int | None = None,
    trust_remote_code: bool = False,
) -> Explanation:
    """What the pass does with a decode step of a causal language model of transformers.

    Nothing is downloaded, no weights are read and no memory is taken for them.

    Args:
        path: a folder with a config.json, or such a file; a folder may hold the model's code.
        device: what the model is meant for, as for `explain`.
        layers: build the first layers alone, which is faster.
        trust_remote_code: run the model's code that lies in the folder.

    Raises:
        ModelError: there is no such config, no causal language model for it, no attention in the
            layers asked for, no room in the cache for the step, or its decode step fails.
    """
    if step.query_tokens >= step.capacity:
        raise ModelError(
            f"a cache of {step.capacity} tokens, of which one is taken, has no room for a step of "
            f"{step.query_tokens}: give more --capacity or fewer --query-tokens"
        )
    place = torch.device("cuda" if device == "cuda" and torch.cuda.is_available() else "cpu")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _told(f"no model can be made of {path}"):
        config = _shorten(read_config(path, trust_remote_code), layers)
        model = without_data(build(config, trust_remote_code), mode, place)
    with _told(_STEP_FAILS), torch.no_grad(), mode:
        arguments = _decode_arguments(model, step, place)
    # Any other fault is ours, and keeps its traceback.
    with _told(_STEP_FAILS, TorchRuntimeError), torch.no_grad():
        return explain(model, device=device, **arguments)


@contextlib.contextmanager
def _told(what: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Makes any error of a kind inside a ModelError that says `what` failed.

    What a config may raise is transformers' own, or its model's, under no common class.
    """
    try:
        yield
    except ModelError:
        raise
    except kind as error:
        raise ModelError(f"{what}: {_brief(error)}") from error


def _brief(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def read_config(path: Path, trust_remote_code: bool) -> Any:
    """The transformers config in a folder or file.

    Raises:
        ModelError: transformers is not installed, or has no such config.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ModelError("transformers is needed: pip install transformers") from error
    folder = path.parent if path.name == "config.json" else path
    if not path.exists() or (folder.is_dir() and not (folder / "config.json").is_file()):
        raise ModelError(f"{path} is neither a folder with a config.json nor a config file")
    file = folder / "config.json" if folder.is_dir() else path
    with _told(f"transformers cannot read {path}"):
        fields = json.loads(file.read_text(encoding="utf-8"))
        _check_fields(file, fields, folder.is_dir())
        if folder.is_dir():
            return AutoConfig.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=trust_remote_code
            )
        return AutoConfig.for_model(fields.pop("model_type"), **fields)


def _check_fields(file: Path, fields: Any, has_folder: bool) -> None:
    """Refuses what can be no config of transformers, and no model of its own code."""
    import transformers

    if not isinstance(fields, dict):
        raise ModelError(f"{file} holds a {type(fields).__name__}, not the fields of a config")
    kind = fields.get("model_type")
    if "auto_map" in fields:
        if not isinstance(fields["auto_map"], dict):
            raise ModelError(f"the auto_map in {file} is no table of the model's classes")
        if not has_folder:
            raise ModelError(f"{file} names code of the model: give the folder that holds both")
        return
    if not isinstance(kind, str):
        raise ModelError(f"{file} is no config of a model: it has no model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise ModelError(
            f"transformers {transformers.__version__} knows no model_type {kind!r}, which {file} "
            "has; a newer one may"
        )


def build(config: Any, trust_remote_code: bool) -> nn.Module:
    """The model of a config on the meta device, in the config's dtype or else bfloat16.

    Raises:
        ModelError: transformers has no model with a language-model head for the config, cannot
            build it, or its code may not be run or is not on disk.
    """
    import transformers

    _check_code(config, trust_remote_code)
    dtype = getattr(config, "dtype", None) or _DEFAULT_DTYPE
    faults: list[Exception] = []
    for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText"):
        try:
            with torch.device("meta"):
                model: nn.Module = getattr(transformers, name).from_config(
                    config, dtype=dtype, trust_remote_code=trust_remote_code
                )
            return model.requires_grad_(False).eval()
        except Exception as fault:
            faults.append(fault)
    name = type(config).__name__
    for error in faults:
        if not str(error).startswith(_UNKNOWN):
            raise ModelError(f"the model of {name} cannot be built: {_brief(error)}") from error
    raise ModelError(f"transformers has no language model for {name}")


def _check_code(config: Any, trust_remote_code: bool) -> None:
    """Refuses to take transformers' own class for a model that brings its code."""
    code = [str(where) for where in (getattr(config, "auto_map", None) or {}).values()]
    if any("--" in where for where in code):
        raise ModelError(f"the model's code is not in the folder: {', '.join(code)}")
    if code and not trust_remote_code:
        raise ModelError("the folder holds the model's code: add --trust-remote-code to run it")


def _shorten(config: Any, layers: int | None) -> Any:
    """`config` with its first layers alone; lists with one entry a layer get as short.

    Raises:
        ModelError: no layer with attention is left, or the config does not count its layers.
    """
    if layers is None:
        return config
    with _told(
        f"--layers {layers} cannot be had: {type(config).__name__} does not count its layers"
    ):
        text = config.get_text_config()
        whole = text.num_hidden_layers
        if layers >= whole:
            return config
        first = next(
            (at for at, kind in enumerate(_kinds(text), 1) if kind not in _WITHOUT_ATTENTION), None
        )
        if first is not None and layers < first:
            raise ModelError(
                f"--layers {layers} leaves no layer with attention: the first is number {first}"
            )
        for name, field in list(vars(text).items()):
            if isinstance(field, list) and len(field) == whole:
                setattr(text, name, field[:layers])
        text.num_hidden_layers = layers
    return config


def _kinds(text: Any) -> list[str]:
    """What each layer is, as the text config calls it; empty where it does not say."""
    return list(getattr(text, "layer_types", None) or ())


def _decode_arguments(model: Any, step: Step, device: torch.device) -> dict[str, Any]:
    """The arguments of a decode step behind one token a sequence, which fills the static cache.

    Raises:
        ModelError: the model has no layer with attention.
    """
    from transformers import StaticCache

    kinds = set(_kinds(model.config.get_text_config()))
    if kinds and kinds <= _WITHOUT_ATTENTION:
        raise ModelError(f"the model has no layer with attention, but {', '.join(sorted(kinds))}")
    names = inspect.signature(model.forward).parameters
    cache = StaticCache(config=model.config, max_cache_len=step.capacity)
    # transformers 5.24 renamed the argument.
    shared = {"cache" if "cache" in names else "past_key_values": cache, "use_cache": True}
    for tokens, start in ((1, 0), (step.query_tokens, 1)):
        ids = torch.zeros(step.batch, tokens, dtype=torch.int64, device=device)
        positions = torch.arange(start, start + tokens, device=device)
        arguments = {
            "input_ids": ids,
            "position_ids": positions.expand(step.batch, tokens),
            **shared,
        }
        if start == 0:
            model(**arguments)
    return arguments
