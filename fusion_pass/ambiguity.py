"""Refusal of keywords that `explain` and the function that it is given both have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from torch import nn

from fusion_pass.tracing import original, reject_compiled_caller

_P = ParamSpec("_P")
_R = TypeVar("_R")


def unambiguous(*further: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates what explains a function: an option that the function also has raises TypeError.

    Options are the keyword-only parameters of what is decorated, and `further` ones.
    """

    def decorate(explaining: Callable[_P, _R]) -> Callable[_P, _R]:
        parameters = inspect.signature(explaining).parameters.values()
        own = [option.name for option in parameters if option.kind is option.KEYWORD_ONLY]
        options = {*own, *further}
        told = explaining.__name__

        @functools.wraps(explaining)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            reject_compiled_caller()
            function, *given = args or (None,)
            if asked := options & kwargs.keys():
                for name in sorted(asked & nameable(function, len(given))):
                    raise TypeError(
                        f"{name} is an option of {told} and a parameter of what it is given; bind "
                        f"the latter first: {told}(functools.partial(function, {name}=...), ...), "
                        f"to which {name}=... may be given as the option"
                    )
            return explaining(*args, **kwargs)

        return checked

    return decorate


def nameable(function: Any, positional: int) -> set[str]:
    """The parameters that a call may still name, after so many arguments by position.

    Those that a functools.partial binds are not among them, nor what `**kwargs` would take.
    """
    bound: set[str] = set()
    while isinstance(function := _whole(function), functools.partial):
        bound |= function.keywords.keys()
        positional += len(function.args)
        function = function.func
    if isinstance(function, nn.Module) and type(function).__call__ is nn.Module.__call__:
        function = function.forward
    try:
        names = set.intersection(*(set(names) for names in _names(function, positional)))
    except Exception:
        # A signature is the program's own property, and may raise whatever it likes.
        return set()
    return names - bound


def _whole(function: Any) -> Any:
    """The module whose bound `__call__` this is, and what was compiled, if it was."""
    while True:
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", None)
        called = isinstance(owner, nn.Module) and name in ("__call__", nn.Module.__call__.__name__)
        inner = owner if called else original(function)
        if inner is function:
            return function
        function = inner


def _names(function: Any, positional: int) -> Iterator[list[str]]:
    """The parameters that may be named, of a function and of each that it wraps."""
    while function is not None:
        parameters = list(inspect.signature(function, follow_wrapped=False).parameters.values())
        wrapped = getattr(function, "__wrapped__", None)
        # Whatever keywords a wrapper takes it may pass on.
        if wrapped is None or not any(p.kind is p.VAR_KEYWORD for p in parameters):
            left = [p for p in parameters[positional:] if p.kind is p.POSITIONAL_OR_KEYWORD]
            left += [p for p in parameters if p.kind is p.KEYWORD_ONLY]
            yield [parameter.name for parameter in left]
        # What a method wraps takes the object as well.
        positional += inspect.ismethod(function)
        function = wrapped
