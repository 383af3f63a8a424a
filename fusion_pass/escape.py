"""Tensors without data that a traced program left in what belongs to the user."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fusion_pass.isolation import Isolation, global_names, is_of_library

_LIMIT = 100_000
_Contents = dict[Any, Any] | list[Any]


class Watch:
    """What the program of an isolation can still reach of the user's, as it was before the run."""

    def __init__(self, isolation: Isolation, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._roots = [*isolation.reached, *_reached_by_classes(isolation)]
        self._before = [(found, _copied(found)) for _, found in _contents(self._roots)]

    def check(self) -> None:
        """Puts back what was changed, if it now holds a tensor of the run.

        Raises:
            TypeError: it did; names the object.
        """
        name = next((name for name, found in _contents(self._roots) if self._is_in(found)), None)
        if name is None:
            return
        for found, before in self._before:
            if _has_other(found, before):
                _put_back(found, before)
        raise TypeError(
            f"explain cannot keep the program from changing {name}, which a method or a class "
            "reaches by itself; it was put back. Pass the object as an argument, or make it an "
            "attribute of the module, so that it is copied"
        )

    def _is_in(self, found: _Contents) -> bool:
        return any(map(self._is_of_run, _values(found)))

    def _is_of_run(self, value: Any) -> bool:
        return isinstance(value, FakeTensor) and value.fake_mode is self._mode


def _has_other(found: _Contents, before: _Contents) -> bool:
    if len(found) != len(before):
        return True
    pairs = zip(_values(found), _values(before), strict=True)
    return any(new is not old for new, old in pairs)


def _copied(found: _Contents) -> _Contents:
    return dict(found) if isinstance(found, dict) else list(found)


def _put_back(found: _Contents, before: _Contents) -> None:
    if isinstance(found, dict) and isinstance(before, dict):
        found.clear()
        found.update(before)
    elif isinstance(found, list):
        found[:] = before


def _values(contents: _Contents) -> list[Any]:
    return list(contents.values()) if isinstance(contents, dict) else list(contents)


def _contents(roots: list[tuple[str, Any]]) -> Iterator[tuple[str, _Contents]]:
    """The dicts and lists that are reached from `roots`, with the name of the root."""
    seen: set[int] = set()
    stack = list(roots)
    while stack and len(seen) < _LIMIT:
        name, thing = stack.pop()
        if id(thing) in seen or _is_opaque(thing):
            continue
        seen.add(id(thing))
        if isinstance(thing, tuple):
            stack += [(name, value) for value in thing]
            continue
        found = thing if isinstance(thing, dict | list) else getattr(thing, "__dict__", None)
        if isinstance(found, dict | list):
            yield name, found
            stack += [(name, value) for value in _values(found)]


def _is_opaque(thing: Any) -> bool:
    skipped = type | types.ModuleType | types.FunctionType | Tensor | str | bytes | int | float
    return thing is None or isinstance(thing, skipped)


def _reached_by_classes(isolation: Isolation) -> Iterator[tuple[str, Any]]:
    """Globals and class attributes that methods of the copied objects use."""
    seen: set[type] = set()
    for original in isolation.originals():
        for owner in type(original).__mro__:
            if owner in seen or _is_of_library(owner):
                continue
            seen.add(owner)
            for name, member in vars(owner).items():
                inner = getattr(member, "__func__", member)
                if isinstance(inner, types.FunctionType):
                    yield from _globals(inner, set())
                elif not name.startswith("__"):
                    yield f"{owner.__name__}.{name}", member


def _globals(function: types.FunctionType, seen: set[types.CodeType]) -> Iterator[tuple[str, Any]]:
    if function.__code__ in seen or is_of_library(function.__code__.co_filename):
        return
    seen.add(function.__code__)
    for name in global_names(function.__code__) & function.__globals__.keys():
        held = function.__globals__[name]
        if isinstance(held, types.FunctionType):
            yield from _globals(held, seen)
        else:
            yield f"the global {name}", held


def _is_of_library(owner: type) -> bool:
    if owner.__module__ == "builtins":
        return True
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    return file is not None and is_of_library(file)
