"""An identity of a function and of all that it is bound to, for cache keys."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, EllipsisType, FunctionType, ModuleType
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes, EllipsisType)
_NAMED = (torch.dtype, torch.device, torch._ops.OpOverload)
_OF_CODE = (
    "co_code",
    "co_exceptiontable",
    "co_flags",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_names",
    "co_varnames",
    "co_freevars",
    "co_cellvars",
    "co_consts",
)


class _UnknownError(Exception):
    """A value that does not tell what it does, or that may do something else later."""


class Identity:
    """What a function does, as a hash that is the same in another process.

    Hashed are the function's code and the file that holds it, and as they are whenever the hash is
    asked for its defaults, its attributes and what its closure or a `functools.partial` binds it
    to: numbers, text, dtypes, operators, imported modules, functions, and tuples and frozensets of
    these. The file is read once: what it holds later is not what runs.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._files: dict[str, str] = {}
        self.fingerprint()

    def fingerprint(self) -> str | None:
        """The hash; None if the function is bound to anything else, or to itself."""
        try:
            return _Hasher(self._files).hash(self._function)
        except Exception:
            # Whatever an odd value raises when it is looked at, it has no identity.
            return None


class _Hasher:
    """One walk over a value; a part that is met twice is hashed once."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files
        # Of each part by its id, which is its own for as long as the part is held here.
        self._hashes: dict[int, str] = {}
        self._held: list[Any] = []
        self._open: set[int] = set()

    def hash(self, value: Any) -> str:
        """A hash that values of other meanings do not have."""
        kind = type(value)
        if kind in _PLAIN or isinstance(value, _NAMED):
            return _digest(kind.__name__, repr(value))
        if id(value) not in self._hashes:
            if id(value) in self._open:
                # A function that reaches itself: no hash of its parts comes first.
                raise _UnknownError
            self._held.append(value)
            self._open.add(id(value))
            self._hashes[id(value)] = self._compound(kind, value)
        return self._hashes[id(value)]

    def _compound(self, kind: type, value: Any) -> str:
        if kind is tuple:
            return self._all("tuple", value)
        if kind is frozenset:
            return _digest("frozenset", *sorted(map(self.hash, value)))
        if kind is functools.partial:
            return self._all("partial", (value.func, value.args, *_items(value.keywords)))
        if kind is FunctionType:
            return self._function(value)
        if kind is CodeType:
            return self._all("code", (getattr(value, name, None) for name in _OF_CODE))
        if kind is CellType:
            return self._all("cell", _content(value))
        if kind is BuiltinFunctionType and isinstance(value.__self__, ModuleType):
            return self._all("built in", (value.__self__, value.__name__))
        if kind is ModuleType and value in _imported(value.__name__):
            return _digest("module", value.__name__)
        raise _UnknownError

    def _function(self, function: FunctionType) -> str:
        bound = function.__defaults__, *_items(function.__kwdefaults__ or {}), None
        cells = tuple(function.__closure__ or ())
        parts = (function.__code__, bound, cells, *_items(function.__dict__))
        return self._all("function", (self._file(function), *parts))

    def _file(self, function: FunctionType) -> str:
        """A hash of the file that defines `function`; empty where there is none."""
        name = function.__code__.co_filename
        if name not in self._files:
            try:
                content = Path(inspect.getsourcefile(function) or "").read_bytes()
                self._files[name] = hashlib.sha256(content).hexdigest()
            except (TypeError, OSError):
                # Typed into a shell.
                self._files[name] = ""
        return self._files[name]

    def _all(self, kind: str, parts: Iterable[Any]) -> str:
        return _digest(kind, *map(self.hash, parts))


def _imported(name: str) -> tuple[ModuleType, ...]:
    return (sys.modules[name],) if name in sys.modules else ()


def _items(named: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(named.items())


def _content(cell: CellType) -> tuple[Any, ...]:
    """What a cell holds; nothing if its variable has not been assigned."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _digest(*texts: str) -> str:
    """A hash of a sequence of texts, wherever one ends and the next begins."""
    whole = hashlib.sha256()
    for text in texts:
        encoded = text.encode()
        whole.update(b"%d:" % len(encoded) + encoded)
    return whole.hexdigest()
