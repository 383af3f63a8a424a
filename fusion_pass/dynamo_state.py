"""State of the process that a trace changes, put back after it: private APIs of torch."""

from __future__ import annotations

import copy
import random
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch._C._dynamo import eval_frame
from torch._dynamo import convert_frame, pgo, symbolic_convert
from torch._dynamo.utils import counters


def is_compiling() -> bool:
    """Whether the caller is being compiled, or runs inside a compiled function."""
    return torch.compiler.is_compiling() or callable(eval_frame.get_eval_frame_callback())


@contextmanager
def untouched() -> Iterator[None]:
    """Puts back what a trace adds to dynamo, and what a program changes of torch's settings.

    A code that the user had compiled, and to which the trace added an entry, loses all entries:
    dynamo cannot take out one. It is compiled anew at its next call.
    """
    with ExitStack() as stack:
        for keep in (_keep_counters, _keep_profile, _keep_codes, _keep_modes, _keep_random):
            stack.enter_context(keep())
        yield


@contextmanager
def _keep_counters() -> Iterator[None]:
    before = {name: Counter(counter) for name, counter in counters.items()}
    try:
        yield
    finally:
        counters.clear()
        counters.update(before)


@contextmanager
def _keep_profile() -> Iterator[None]:
    """The sizes that were seen, by which dynamo makes a size symbolic at the next other one."""
    state = pgo.get_code_state()
    before = copy.deepcopy(dict(state))
    try:
        yield
    finally:
        state.clear()
        state.update(before)


@contextmanager
def _keep_codes() -> Iterator[None]:
    # With the codes themselves, so that no id is given to another one.
    before = {id(code): (code, _entries(code)) for code in _codes()}
    try:
        yield
    finally:
        for code in _codes():
            if id(code) not in before or _entries(code) > before[id(code)][1]:
                eval_frame.reset_code(code)
        _remember({key: code for key, (code, _) in before.items()})
        # It keeps the modules of the copied globals alive.
        getattr(symbolic_convert._import_module, "cache_clear", lambda: None)()


def _codes() -> list[types.CodeType]:
    return [code for seen in convert_frame.input_codes.seen if (code := seen()) is not None]


def _entries(code: types.CodeType) -> int:
    return len(eval_frame._debug_get_cache_entry_list(code))


def _remember(codes: dict[int, types.CodeType]) -> None:
    """Has dynamo know `codes` alone of those that it looked at."""
    tracker = convert_frame.input_codes
    tracker.clear()
    for code in codes.values():
        tracker.add(code)


@contextmanager
def _keep_modes() -> Iterator[None]:
    grad, default = torch.is_grad_enabled(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(default)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


@contextmanager
def _keep_random() -> Iterator[None]:
    state, python = torch.get_rng_state(), random.getstate()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        if devices:
            torch.cuda.set_rng_state_all(devices)
