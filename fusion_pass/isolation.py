"""Copies of functions that share no state with them: what closures, globals and hooks reach."""

from __future__ import annotations

import copy
import dis
import functools
import itertools
import os
import site
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import nn

Memo = dict[int, Any]
"""As of `copy.deepcopy`: by the id of an object, its copy."""

_FOLDERS = (
    *(str(Path(file).parent) for file in (__file__, torch.__file__)),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
)
_LIBRARIES = tuple(
    {str(path) + os.sep for folder in _FOLDERS for path in (Path(folder), Path(folder).resolve())}
)
# Known to torch or Triton by their identity: a copy would be another operator.
_KEPT_PACKAGES = (
    "torch._C",
    "torch._ops",
    "torch._library",
    "torch._higher_order_ops",
    "triton",
    "torch.distributed.device_mesh",
)
_NUMBERS = itertools.count()


class Isolation:
    """One deep copy, in which functions are copied too, with all that they refer to.

    Python modules, classes, their methods and what these refer to stay as they are, and so does
    what a closure or a global holds that cannot be copied.

    Attributes:
        reached: what closures, globals and defaults of the originals hold, each after its name.
    """

    def __init__(self) -> None:
        self.reached: list[tuple[str, Any]] = []
        self._memo: Memo = {}
        self._cells: dict[int, tuple[types.CellType, types.CellType]] = {}
        self._scopes: dict[int, tuple[types.ModuleType, set[str]]] = {}

    def copy(self, things: Any) -> Any:
        """A deep copy of `things`; modules right in it get a `forward` of their own.

        Raises:
            TypeError, RuntimeError: something that no closure or global holds cannot be copied.
        """
        with _functions_are_copied_by(self):
            found = copy.deepcopy(things, self._memo)
            for module in torch.utils._pytree.tree_leaves(found):
                if isinstance(module, nn.Module):
                    self._give_forward(module)
        return found

    def originals(self) -> list[Any]:
        """What was copied, other than functions."""
        return list(self._memo.get(id(self._memo), ()))

    @contextmanager
    def importable(self) -> Iterator[None]:
        """Has dynamo find the copied globals, which it imports by the name of their module."""
        modules = {module.__name__: module for module, _ in self._scopes.values()}
        sys.modules.update(modules)
        try:
            yield
        finally:
            for name in modules:
                sys.modules.pop(name, None)

    def function(self, function: types.FunctionType, memo: Memo) -> types.FunctionType:
        """The copy of `function`; one of a library is copied only if it wraps one of the user's."""
        if _is_known_by_identity(function):
            return function
        compiled = vars(function).get("_torchdynamo_orig_callable")
        if compiled is not None and not hasattr(function, "_torchdynamo_disable"):
            # Its own compile would generate code, and run it on tensors without data.
            uncompiled: types.FunctionType = copy.deepcopy(compiled, memo)
            return uncompiled
        if is_of_library(function.__code__.co_filename):
            return self._wrapper(function, memo)
        scope, seen = self._scope(function.__globals__)
        closure = tuple(map(self._cell, function.__closure__ or ()))
        found = _rebuilt(function, function.__code__.replace(), vars(scope), closure)
        memo[id(function)] = found
        for name in global_names(function.__code__) - seen:
            seen.add(name)
            if name in function.__globals__:
                held = function.__globals__[name]
                vars(scope)[name] = self._held(f"the global {name}", held, memo)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._fill(name, cell, memo)
        where = f"a default of {function.__name__}"
        found.__defaults__ = self._held(where, function.__defaults__, memo)
        found.__kwdefaults__ = self._held(where, function.__kwdefaults__, memo)
        vars(found).update(self._held(f"an attribute of {function.__name__}", vars(found), memo))
        return found

    def _wrapper(self, function: types.FunctionType, memo: Memo) -> types.FunctionType:
        """A decorator's function, such as that of torch.no_grad(), around the copy of another."""
        memo[id(function)] = function
        cells = function.__closure__ or ()
        closure = tuple(self._cell_of_wrapper(cell, memo) for cell in cells)
        if all(new is old for new, old in zip(closure, cells, strict=True)):
            del memo[id(function)]
            return function
        found = _rebuilt(function, function.__code__, function.__globals__, closure)
        memo[id(function)] = found
        for name, value in vars(function).items():
            if isinstance(value, types.FunctionType):
                vars(found)[name] = copy.deepcopy(value, memo)
        if "_torchdynamo_wrapper_id" in vars(found):
            vars(found)["_torchdynamo_wrapper_id"] = id(found)
        return found

    def _cell_of_wrapper(self, cell: types.CellType, memo: Memo) -> types.CellType:
        held = _contents(cell)
        if not isinstance(held, types.FunctionType | types.MethodType | functools.partial):
            return cell
        found = copy.deepcopy(held, memo)
        same = found is held
        if isinstance(held, types.MethodType):
            same = found == held
        return cell if same else types.CellType(found)

    def _cell(self, cell: types.CellType) -> types.CellType:
        if id(cell) not in self._cells:
            self._cells[id(cell)] = cell, types.CellType()
        return self._cells[id(cell)][1]

    def _fill(self, name: str, cell: types.CellType, memo: Memo) -> None:
        found, held = self._cell(cell), _contents(cell)
        if _contents(found) is _EMPTY and held is not _EMPTY:
            # Marks it as being filled: a function may be in a cell of its own.
            found.cell_contents = held
            found.cell_contents = self._held(f"the closed-over {name}", held, memo)

    def _scope(self, scope: dict[str, Any]) -> tuple[types.ModuleType, set[str]]:
        if id(scope) not in self._scopes:
            name = f"{scope.get('__name__', 'unnamed')}_isolated_{next(_NUMBERS)}"
            module = types.ModuleType(name.replace(".", "_"))
            name = module.__name__
            vars(module).update(scope)
            module.__name__ = name
            self._scopes[id(scope)] = module, set()
        return self._scopes[id(scope)]

    def _held(self, name: str, value: Any, memo: Memo) -> Any:
        """A copy of what a function holds, which was not given to be copied: it need not be."""
        if _stays(value):
            return value
        self.reached.append((name, value))
        before = dict(memo)
        try:
            return copy.deepcopy(value, memo)
        except Exception:
            memo.clear()
            memo.update(before)
            return value

    def _give_forward(self, module: nn.Module) -> None:
        # Dynamo keeps what it compiled by code, which the modules of a class share. An inner module
        # is left: its path in the model, which dynamo notes, would be that of the method.
        forward = getattr(type(module), "forward", None)
        if "forward" in vars(module) or not isinstance(forward, types.FunctionType):
            return
        if type(module).__module__.partition(".")[0] == "torch":
            return
        found = copy.deepcopy(forward, self._memo)
        if found is forward:
            closure = forward.__closure__ or ()
            found = _rebuilt(forward, forward.__code__.replace(), forward.__globals__, closure)
        vars(module)["forward"] = types.MethodType(found, module)


def is_of_library(file: str) -> bool:
    """Whether code of `file` is Python's, torch's or of an installed package."""
    return file.startswith(_LIBRARIES) or file.startswith("<frozen ")


@functools.cache
def global_names(code: types.CodeType) -> frozenset[str]:
    """The globals that `code`, or code in it, reads or writes."""
    found = {
        str(step.argval) for step in dis.get_instructions(code) if step.opname.endswith("_GLOBAL")
    }
    inner = (global_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(found.union(*inner))


class _Empty:
    """What an empty cell holds."""


_EMPTY = _Empty()


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _rebuilt(
    function: types.FunctionType,
    code: types.CodeType,
    scope: dict[str, Any],
    closure: tuple[types.CellType, ...],
) -> types.FunctionType:
    found = types.FunctionType(code, scope, function.__name__, function.__defaults__, closure)
    found.__kwdefaults__ = function.__kwdefaults__
    found.__qualname__ = function.__qualname__
    found.__module__ = function.__module__
    found.__doc__ = function.__doc__
    vars(found).update(vars(function))
    return found


def _stays(value: Any) -> bool:
    # A plain object() is a sentinel, which is asked for by its identity.
    kind = type(value)
    return (
        value is None
        or kind is object
        or isinstance(value, type | types.ModuleType | types.BuiltinFunctionType)
        or str(getattr(kind, "__module__", "")).startswith(_KEPT_PACKAGES)
    )


def _is_known_by_identity(function: types.FunctionType) -> bool:
    """Whether dynamo treats `function` in a way of its own, such as allow_in_graph's."""
    rules = torch._dynamo.trace_rules
    asked = ("is_callable_allowed", "is_callable_disallowed", "is_nonstrict_trace_callable")
    return any(getattr(rules, ask, lambda _: False)(function) for ask in asked)


_CURRENT: ContextVar[Isolation] = ContextVar("isolation")
_LOCK = threading.RLock()


def _copy_function(function: types.FunctionType, memo: Memo) -> types.FunctionType:
    isolation = _CURRENT.get(None)
    return function if isolation is None else isolation.function(function, memo)


def _copy_method(method: types.MethodType, memo: Memo) -> types.MethodType:
    inner = copy.deepcopy(method.__func__, memo)
    return types.MethodType(inner, copy.deepcopy(method.__self__, memo))


def _copy_compiled(module: torch._dynamo.OptimizedModule, memo: Memo) -> Any:
    return copy.deepcopy(module._orig_mod, memo)


@contextmanager
def _functions_are_copied_by(isolation: Isolation) -> Iterator[None]:
    """`copy.deepcopy` of a function in this thread asks `isolation`, not returning it as it is."""
    with _LOCK:
        dispatch: dict[type, Callable[..., Any]] = vars(copy)["_deepcopy_dispatch"]
        before = dict(dispatch)
        # Of Python 3.14, which looks there first.
        atomic: frozenset[type] | None = vars(copy).get("_atomic_types")
        if atomic is not None:
            vars(copy)["_atomic_types"] = atomic - {types.FunctionType}
        dispatch.update({types.FunctionType: _copy_function, types.MethodType: _copy_method})
        dispatch[torch._dynamo.OptimizedModule] = _copy_compiled
        token = _CURRENT.set(isolation)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            dispatch.clear()
            dispatch.update(before)
            if atomic is not None:
                vars(copy)["_atomic_types"] = atomic
