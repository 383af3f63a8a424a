"""Config: validation, defaults from the environment, the off switch, logging."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import warnings
from collections.abc import Iterator

import pytest

from fusion_pass import Config, ConfigError
from fusion_pass.config import configure_logging, warn_once


@pytest.fixture(autouse=True)
def _warn_again() -> None:
    warn_once.cache_clear()


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("fusion_pass")
    level, handlers = logger.level, list(logger.handlers)
    yield logger
    logger.setLevel(level)
    logger.handlers[:] = handlers


def test_defaults() -> None:
    assert Config() == Config.from_environment()
    assert Config() == Config(
        enabled=True,
        devices=("cuda",),
        numerics="compiled",
        policy="measured",
        table=None,
        dump=None,
        log=None,
        strict=False,
    )


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().enabled = False


@pytest.mark.parametrize(
    ("field", "value", "advice"),
    [
        ("enabled", 1, "True or False"),
        ("devices", (), '("cuda", "cpu")'),
        ("devices", "cpu", '("cuda", "cpu")'),
        ("devices", ("cpu", "tpu"), '("cuda", "cpu")'),
        ("devices", (0,), '("cuda", "cpu")'),
        ("numerics", "exact", '"compiled" or "eager" or "fp32"'),
        ("numerics", None, '"compiled" or "eager" or "fp32"'),
        ("policy", "sometimes", '"measured" or "always" or "never"'),
        ("policy", True, '"measured" or "always" or "never"'),
        ("table", "", "path of a file"),
        ("table", 3, "path of a file"),
        ("dump", "", "path of a folder"),
        ("dump", 3, "path of a folder"),
        ("log", "loud", '"info" or "debug"'),
        ("strict", "yes", "True or False"),
    ],
)
def test_invalid_value_is_refused_with_advice(field: str, value: object, advice: str) -> None:
    for make in (Config, Config.from_environment):
        with pytest.raises(ConfigError) as refusal:
            make(**{field: value})
        assert f"{field}={value!r}" in str(refusal.value)
        assert advice in str(refusal.value)


def test_unknown_override_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'device'.*enabled, devices, numerics"):
        Config.from_environment(device="cpu")


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("FUSION_PASS", "0", "enabled", False),
        ("FUSION_PASS", "False", "enabled", False),
        ("FUSION_PASS", "off", "enabled", False),
        ("FUSION_PASS", "1", "enabled", True),
        ("FUSION_PASS", "true", "enabled", True),
        ("FUSION_PASS", "", "enabled", True),
        ("FUSION_PASS_DEVICES", "cpu", "devices", ("cpu",)),
        ("FUSION_PASS_DEVICES", "CPU, cuda", "devices", ("cpu", "cuda")),
        ("FUSION_PASS_NUMERICS", "eager", "numerics", "eager"),
        ("FUSION_PASS_POLICY", "Always", "policy", "always"),
        ("FUSION_PASS_TABLE", "/some/table.json", "table", "/some/table.json"),
        ("FUSION_PASS_DUMP", "/some/where", "dump", "/some/where"),
        ("FUSION_PASS_LOG", "DEBUG", "log", "debug"),
        ("FUSION_PASS_STRICT", "1", "strict", True),
    ],
)
def test_environment_gives_the_default(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, field: str, value: object
) -> None:
    monkeypatch.setenv(variable, text)
    assert getattr(Config.from_environment(), field) == value


def test_override_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_PASS_NUMERICS", "eager")
    assert Config.from_environment(numerics="fp32").numerics == "fp32"


def test_off_switch_beats_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Config.from_environment(enabled=True).enabled
    monkeypatch.setenv("FUSION_PASS", "0")
    assert not Config.from_environment(enabled=True).enabled
    assert not Config(enabled=True).enabled


@pytest.mark.parametrize(
    ("variable", "text", "accepted"),
    [
        ("FUSION_PASS", "2", "true"),
        ("FUSION_PASS_DEVICES", "tpu", "cuda,cpu"),
        ("FUSION_PASS_DEVICES", "cpu,", "cuda,cpu"),
        ("FUSION_PASS_NUMERICS", "exact", "compiled"),
        ("FUSION_PASS_POLICY", "sometimes", "never"),
        ("FUSION_PASS_LOG", "5", "debug"),
        ("FUSION_PASS_STRICT", "maybe", "true"),
    ],
)
def test_invalid_variable_warns_once_and_counts_as_unset(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, accepted: str
) -> None:
    monkeypatch.setenv(variable, text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, second = Config.from_environment(), Config.from_environment()
    assert first == second == Config()
    (warning,) = caught
    for part in (variable, repr(text), accepted):
        assert part in str(warning.message)


def test_cache_key_holds_what_changes_the_rewrite() -> None:
    key = Config().cache_key()
    assert pickle.loads(pickle.dumps(key)) == key
    assert (
        Config(devices=("cpu", "cuda")).cache_key() == Config(devices=("cuda", "cpu")).cache_key()
    )
    changes: tuple[dict[str, object], ...] = (
        {"enabled": False},
        {"devices": ("cpu",)},
        {"numerics": "eager"},
        {"policy": "never"},
        {"strict": True},
    )
    for change in changes:
        assert Config(**change).cache_key() != key
    for same in ({"dump": "x"}, {"log": "info"}):
        assert Config(**same).cache_key() == key


def test_logging_is_left_alone_by_default(logger: logging.Logger) -> None:
    before = logger.level, list(logger.handlers)
    configure_logging(Config())
    assert (logger.level, logger.handlers) == before


@pytest.mark.parametrize(("log", "level"), [("info", logging.INFO), ("debug", logging.DEBUG)])
def test_log_sets_the_level(logger: logging.Logger, log: str, level: int) -> None:
    configure_logging(Config(log=log))
    assert logger.level == level


def test_log_adds_a_handler_only_where_there_is_none(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest itself puts handlers on the root logger.
    configure_logging(Config(log="info"))
    assert logger.handlers == []
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    configure_logging(Config(log="info"))
    configure_logging(Config(log="debug"))
    assert len(logger.handlers) == 1
