"""An AOTInductor package with the fusion: compiled once, loaded without Python code of the model.

On a GPU the package holds the Triton kernels themselves. On a CPU the fused operator is Python,
which a package cannot hold, so that the pass declines and the package is stock's.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fusion_pass

device = "cuda" if torch.cuda.is_available() else "cpu"


class Layer(nn.Module):
    """A gated attention over K and V: (B, Q, H * D)."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        output = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return output.transpose(1, 2).flatten(2) * torch.sigmoid(gate)


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = ((2, 8, 1, 64), (2, 2, 512, 64), (2, 2, 512, 64), (2, 1, 512))
    return tuple(torch.randn(size, device=device, dtype=dtype) for size in sizes)


@torch.no_grad()
def main() -> None:
    args = inputs()
    program = torch.export.export(Layer(), args)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "layer.pt2")
        # The C++ around the kernels is compiled quickly, not well: this is an example.
        options = {"aot_inductor.compile_wrapper_opt_level": "O0"}
        # What would only save the gate is not fused unless asked for or measured.
        with fusion_pass.enable(devices=(device,), policy="always"):
            torch._inductor.aoti_compile_and_package(
                program, package_path=path, inductor_configs=options
            )
        counts = dict(counters["fusion_pass"])
        print("counters:", counts)
        expected = {"fused": 1} if device == "cuda" else {"declined": 1, "declined: device": 1}
        assert counts == expected
        loaded = torch._inductor.aoti_load_package(path)
        found = loaded(*args)

    exact = Layer()(*[x.double() for x in args])
    stock = Layer()(*args)
    error, bound = ((x - exact).norm() / exact.norm() for x in (found, stock))
    print(f"relative error: package {error:.1e}, eager {bound:.1e}")
    assert error <= 1.5 * bound


if __name__ == "__main__":
    main()
