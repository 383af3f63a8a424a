"""Where in the user's program a graph node comes from."""

from __future__ import annotations

import os
import re

import torch
from torch.fx import Node

# Of a program that calls fusion_pass's own functions, the user looks for the calls.
_NOT_THE_USERS = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>\S+)')
_ROOT = re.compile(r"^L(\['[^']*'\])(\[\d+\])?")
_MEMBERS = re.compile(r"\._modules\['([^']*)'\]|\['([^']*)'\]|\[(\d+)\]")


def module_path(node: Node) -> str | None:
    """The innermost module that computes `node`, such as "model.layers.3.self_attn".

    None if no module but the outermost one does, or the graph does not tell.
    """
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path = _ROOT.sub("", str(list(stack.values())[-1][0]))
    members = _MEMBERS.sub(lambda match: f".{match[1] or match[2] or match[3]}", path)
    return members.lstrip(".") or None


def frames(node: Node) -> tuple[str, ...]:
    """The calls that led to `node`, outermost first, as "file:line in function", without those of
    torch and fusion_pass.

    All of them if all are theirs; none if the graph does not tell.
    """
    found = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    own = [frame for frame in found if not frame["file"].startswith(_NOT_THE_USERS)] or found
    return tuple(f"{frame['file']}:{frame['line']} in {frame['function']}" for frame in own)
