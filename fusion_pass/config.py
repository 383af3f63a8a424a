"""Settings: one frozen `Config`, whose defaults come from the environment."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

DEVICES = ("cuda", "cpu")
NUMERICS = ("compiled", "eager", "fp32")
POLICIES = ("measured", "always", "never")
LOG_LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}

_FALSE = ("0", "false", "no", "off")
_TRUE = ("1", "true", "yes", "on")


class ConfigError(ValueError):
    """A setting that was given explicitly has an unknown name or an invalid value."""


@dataclass(frozen=True)
class Config:
    """What the pass rewrites and what it tells.

    Attributes:
        enabled: whether the pass does anything. `FUSION_PASS=0` in the environment, read when
            the Config is made, wins over `enabled=True`.
        devices: device types whose graphs are rewritten, a subset of ("cuda", "cpu").
        numerics: how the gate rounds, given the attention output `o` in fp32, the gate `g` and
            the model dtype `T`: "compiled" is `T(T(o) * sigmoid_fp32(g))`, as Inductor computes
            it; "eager" is `T(T(o) * T(sigmoid(g)))`, as eager torch does; "fp32" is
            `T(o * sigmoid_fp32(g))`, rounded once.
        policy: which of the attentions that can be fused are: "measured" those where it pays by
            structure or by the table in force, "always" all, "never" none.
        table: file that `python -m fusion_pass tune` wrote, for the policy "measured"; None is
            the one in the user's cache folder, or else the one that the package has.
        dump: folder that gets each graph before and after, and its report; None writes nothing.
        log: level of the logger "fusion_pass": None leaves it alone, "info" tells of each graph
            that has an attention, "debug" of each attention in it.
        strict: raise an internal fault instead of logging it and leaving the graph as it was.

    Raises:
        ConfigError: a value is invalid; the message says what is accepted.
    """

    enabled: bool = True
    devices: tuple[str, ...] = ("cuda",)
    numerics: str = "compiled"
    policy: str = "measured"
    table: str | None = None
    dump: str | None = None
    log: str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        _check("enabled", self.enabled, isinstance(self.enabled, bool), "True or False")
        _check("devices", self.devices, _are_devices(self.devices), 'such as ("cuda", "cpu")')
        _check("numerics", self.numerics, self.numerics in NUMERICS, _either(NUMERICS))
        _check("policy", self.policy, self.policy in POLICIES, _either(POLICIES))
        _check("table", self.table, _is_path(self.table), "the path of a file, or None")
        _check("dump", self.dump, _is_path(self.dump), "the path of a folder, or None")
        _check(
            "log",
            self.log,
            self.log is None or self.log in tuple(LOG_LEVELS),
            f"None or {_either(LOG_LEVELS)}",
        )
        _check("strict", self.strict, isinstance(self.strict, bool), "True or False")
        if switched_off():
            object.__setattr__(self, "enabled", False)

    @classmethod
    def from_environment(cls, **overrides: Any) -> Config:
        """The Config that the `FUSION_PASS*` variables describe, with `overrides` on top.

        An invalid variable warns once and counts as unset.

        Raises:
            ConfigError: an override has an unknown name or an invalid value.
        """
        known = [field.name for field in fields(cls)]
        for name in overrides:
            if name not in known:
                raise ConfigError(
                    f"unknown fusion_pass setting {name!r}; known settings are {', '.join(known)}"
                )
        return cls(**(_environment() | overrides))

    def cache_key(self) -> tuple[object, ...]:
        """The settings that change the rewrite, for the `uuid()` of a pass; picklable.

        `strict` is one: a graph in a cache may be one that a fault has left as it was.
        """
        devices = tuple(sorted(set(self.devices)))
        return self.enabled, devices, self.numerics, self.policy, self.strict


def switched_off() -> bool:
    """Whether `FUSION_PASS` in the environment says off."""
    return os.environ.get("FUSION_PASS", "").strip().lower() in _FALSE


def configure_logging(config: Config) -> None:
    """Sets the level that `config.log` names on the logger "fusion_pass".

    Adds one stream handler if neither that logger nor the root logger has any.
    """
    if config.log is None:
        return
    logger = logging.getLogger("fusion_pass")
    logger.setLevel(LOG_LEVELS[config.log])
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)


@functools.cache
def warn_once(message: str) -> None:
    """Issues `message` as a RuntimeWarning the first time it is given in this process."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)


class _Variable(NamedTuple):
    """An environment variable that gives the default of a field of `Config`."""

    name: str
    field: str
    parse: Callable[[str], object]  # raises ValueError
    accepted: str


def _parse_bool(text: str) -> bool:
    word = text.lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(text)
    return word in _TRUE


def _parse_devices(text: str) -> tuple[str, ...]:
    devices = tuple(part.strip().lower() for part in text.split(","))
    if not _are_devices(devices):
        raise ValueError(text)
    return devices


def _parse_word(accepted: tuple[str, ...], text: str) -> str:
    word = text.lower()
    if word not in accepted:
        raise ValueError(text)
    return word


def _either(words: Any) -> str:
    return " or ".join(f'"{word}"' for word in words)


_BOOLEANS = "0, 1, false, true, no, yes, off or on"
_VARIABLES = (
    _Variable("FUSION_PASS", "enabled", _parse_bool, _BOOLEANS),
    _Variable("FUSION_PASS_DEVICES", "devices", _parse_devices, "cuda, cpu or cuda,cpu"),
    _Variable(
        "FUSION_PASS_NUMERICS",
        "numerics",
        functools.partial(_parse_word, NUMERICS),
        _either(NUMERICS),
    ),
    _Variable(
        "FUSION_PASS_POLICY",
        "policy",
        functools.partial(_parse_word, POLICIES),
        _either(POLICIES),
    ),
    _Variable("FUSION_PASS_TABLE", "table", str, "the path of a file"),
    _Variable("FUSION_PASS_DUMP", "dump", str, "the path of a folder"),
    _Variable(
        "FUSION_PASS_LOG",
        "log",
        functools.partial(_parse_word, tuple(LOG_LEVELS)),
        _either(LOG_LEVELS),
    ),
    _Variable("FUSION_PASS_STRICT", "strict", _parse_bool, _BOOLEANS),
)


def _environment() -> dict[str, Any]:
    """The fields of `Config` that the environment sets, by name."""
    settings: dict[str, Any] = {}
    for variable in _VARIABLES:
        text = os.environ.get(variable.name, "").strip()
        if not text:
            continue
        try:
            settings[variable.field] = variable.parse(text)
        except ValueError:
            warn_once(f"ignoring {variable.name}={text!r}: accepted values are {variable.accepted}")
    return settings


def _are_devices(devices: object) -> bool:
    return isinstance(devices, tuple) and bool(devices) and all(name in DEVICES for name in devices)


def _is_path(value: object) -> bool:
    return value is None or (isinstance(value, str) and value != "")


def _check(name: str, value: object, valid: bool, accepted: str) -> None:
    if not valid:
        raise ConfigError(f"fusion_pass setting {name}={value!r} is invalid: use {accepted}")
