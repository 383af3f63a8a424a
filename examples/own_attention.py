"""An attention operator of one's own, made known to the pass by an adapter.

The operator stands for an engine's kernel. Its window has a meaning of its own, so that the adapter
declines it, with a reason that reports show.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx import Node

import fusion_pass
from fusion_pass.patterns import Attention, Decline, Reason, arguments, read_attention

device = "cuda" if torch.cuda.is_available() else "cpu"


@torch.library.custom_op("example::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, window: int = 0) -> Tensor:
    """(B, Hq, Q, D) of (B, Hkv, S, D); a window of 0 is none."""
    if window:
        mask = mask & (torch.arange(key.shape[2], device=key.device) >= key.shape[2] - window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, window: int = 0) -> Tensor:
    return torch.empty_like(query)


def read(node: Node) -> Attention | Decline:
    """What a call of the operator computes, or why it is not known."""
    # By name: the graph leaves arguments out that equal their defaults.
    given = arguments(node)
    if (window := given.pop("window")) != 0:
        return Decline(Reason.MASK_LAYOUT, f"a window of {window} is not read")
    return read_attention(node, "example", **given, output=node)


def layer(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, gate: Tensor, window: int
) -> Tensor:
    """A gated attention as a model writes it: (B, Q, Hq * D)."""
    output = torch.ops.example.attend(query, key, value, mask, window)
    return output.transpose(1, 2).flatten(2) * torch.sigmoid(gate)


@torch.inference_mode()
def main() -> None:
    # Before the first compilation.
    fusion_pass.register_attention(torch.ops.example.attend.default, read)
    step = torch.compile(layer, backend="fusion_pass", options={"fusion_pass.devices": (device,)})

    torch.manual_seed(0)
    sizes = ((2, 8, 1, 64), (2, 2, 128, 64), (2, 2, 128, 64))
    query, key, value = (torch.randn(size, device=device) for size in sizes)
    mask = (torch.arange(128, device=device) < 100).expand(2, 1, 1, 128)
    gate = torch.randn(2, 1, 512, device=device)

    for window in (0, 16):
        found = step(query, key, value, mask, gate, window)
        stock = layer(query, key, value, mask, gate, window)
        torch.testing.assert_close(found, stock, rtol=1e-3, atol=1e-4)
    print("counters:", dict(counters["fusion_pass"]))
    assert counters["fusion_pass"]["fused"] == 1
    assert counters["fusion_pass"]["declined: mask-layout"] == 1


if __name__ == "__main__":
    # What comes from Inductor's cache is not counted.
    torch.compiler.config.force_disable_caches = True
    main()
