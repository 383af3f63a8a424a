"""A fingerprint of a function and of all that it is bound to, for cache keys."""

from __future__ import annotations

import functools
import hashlib
import inspect
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_NAMED = (torch.dtype, torch.device, torch._ops.OpOverload, torch._ops.OpOverloadPacket)


class _UnknownError(Exception):
    """A value whose text does not tell what it does, or that may do something else later."""


def fingerprint(function: object) -> str | None:
    """A hash of what `function` does, the same in another process.

    Hashed are its code and source file, its defaults, and what its closure, a `functools.partial`
    or its class binds it to: numbers, text, enums, dtypes, operators, modules, classes, functions,
    and tuples and frozensets of these.

    Returns:
        None if it is bound to anything else, such as an object, which may change.
    """
    try:
        text = _spell(function, {})
    except _UnknownError:
        return None
    return hashlib.sha256(text.encode()).hexdigest()


def _spell(value: Any, seen: dict[int, int]) -> str:
    """`value` as text that no value of another meaning has."""
    if type(value) in _PLAIN or isinstance(value, _NAMED):
        return f"{type(value).__name__} {value!r}"
    if type(value) in (tuple, frozenset):
        items = [_spell(item, seen) for item in value]
        return f"{type(value).__name__} {items if type(value) is tuple else sorted(items)}"
    if isinstance(value, Enum):
        return f"{_spell(type(value), seen)} {value.name}"
    if type(value) is functools.partial:
        bound = value.args, tuple(sorted(value.keywords.items()))
        return f"partial {_spell((value.func, *bound), seen)}"
    if isinstance(value, MethodType):
        return f"method {_spell((value.__func__, value.__self__), seen)}"
    if isinstance(value, FunctionType):
        return _spell_function(value, seen)
    if isinstance(value, (type, ModuleType)) or _is_built_in(value):
        module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
        return f"{type(value).__name__} {module} {name or value.__name__} {_source(value)}"
    raise _UnknownError


def _spell_function(function: FunctionType, seen: dict[int, int]) -> str:
    if id(function) in seen:
        return f"again {seen[id(function)]}"
    seen[id(function)] = len(seen)
    cells = tuple(cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell))
    keywords = tuple(sorted((function.__kwdefaults__ or {}).items()))
    bound = _spell((function.__defaults__, keywords, cells), seen)
    code = repr(_plain(function.__code__))
    return f"function {function.__qualname__} {_source(function)} {code} {bound}"


def _is_built_in(value: Any) -> bool:
    """Whether `value` is a function of a module that is not written in Python."""
    return isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, ModuleType)


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _source(value: Any) -> str:
    """A hash of the file that defines `value`; empty where there is none."""
    try:
        return hashlib.sha256(Path(inspect.getsourcefile(value) or "").read_bytes()).hexdigest()
    except (TypeError, OSError):
        # Built in, or typed into a shell.
        return ""


def _plain(code: CodeType) -> tuple[object, ...]:
    """What compiled code does, without the addresses and line numbers in it."""
    constants = (_plain(x) if isinstance(x, CodeType) else x for x in code.co_consts)
    return code.co_code, code.co_names, *constants
