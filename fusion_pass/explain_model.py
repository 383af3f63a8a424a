"""`python -m fusion_pass explain`: a transformers model on disk, explained without its weights."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_pass.explainer import explain
from fusion_pass.explanation import Explanation
from fusion_pass.tracing import without_data

_DEFAULT_DTYPE = torch.bfloat16


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
        ModelError: there is no such config, no causal language model for it, or its decode step
            fails, as that of a model without any attention layer.
    """
    config = _shorten(read_config(path, trust_remote_code), layers)
    place = torch.device("cuda" if device == "cuda" and torch.cuda.is_available() else "cpu")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = without_data(build(config, trust_remote_code), mode, place)
    try:
        with torch.no_grad(), mode:
            arguments = _decode_arguments(model, step, place)
    except Exception as error:
        raise ModelError(
            f"a decode step of the model fails, by itself: {type(error).__name__}: {error}"
        ) from error
    with torch.no_grad():
        return explain(model, device=device, **arguments)


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
    try:
        if folder.is_dir():
            return AutoConfig.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=trust_remote_code
            )
        fields = json.loads(path.read_text(encoding="utf-8"))
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    except Exception as error:
        # What a config may raise is transformers' own, some of it under no common class.
        raise ModelError(f"transformers cannot read {path}: {error!r}") from error


def build(config: Any, trust_remote_code: bool) -> nn.Module:
    """The model of a config on the meta device, in the config's dtype or else bfloat16.

    Raises:
        ModelError: transformers has no model with a language-model head for the config, or its code
            may not be run or is not on disk.
    """
    import transformers

    _check_code(config, trust_remote_code)
    dtype = getattr(config, "dtype", None) or _DEFAULT_DTYPE
    error: Exception | None = None
    for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText"):
        try:
            with torch.device("meta"):
                model: nn.Module = getattr(transformers, name).from_config(
                    config, dtype=dtype, trust_remote_code=trust_remote_code
                )
            return model.requires_grad_(False).eval()
        except ValueError as unknown:
            error = error or unknown
    raise ModelError(f"transformers has no language model for {type(config).__name__}: {error}")


def _check_code(config: Any, trust_remote_code: bool) -> None:
    """Refuses to take transformers' own class for a model that brings its code."""
    code = [str(where) for where in (getattr(config, "auto_map", None) or {}).values()]
    if any("--" in where for where in code):
        raise ModelError(f"the model's code is not in the folder: {', '.join(code)}")
    if code and not trust_remote_code:
        raise ModelError("the folder holds the model's code: add --trust-remote-code to run it")


def _shorten(config: Any, layers: int | None) -> Any:
    """`config` with its first layers alone; lists with one entry a layer get as short."""
    text = config.get_text_config()
    whole = text.num_hidden_layers
    if layers is None or layers >= whole:
        return config
    for name, field in list(vars(text).items()):
        if isinstance(field, list) and len(field) == whole:
            setattr(text, name, field[:layers])
    text.num_hidden_layers = layers
    return config


def _decode_arguments(model: Any, step: Step, device: torch.device) -> dict[str, Any]:
    """The arguments of a decode step behind one token a sequence, which fills the static cache."""
    from transformers import StaticCache

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
