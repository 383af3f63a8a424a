"""Tensor-parallel greedy decode in which every rank fuses the gated attention of its own heads.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    FUSION_PASS_DEVICES=cuda,cpu torchrun --nproc-per-node 2 examples/tensor_parallel.py --tiny

An unmodified transformers model with random weights is sharded by its own plan (`--plan auto`,
which needs `accelerate` and is the default where that is installed) or by PyTorch's
`parallelize_module` (`--plan manual`), compiled with `backend="fusion_pass"`, and decodes with a
static cache. Its tokens are compared with those of the whole model, not compiled, which every rank
runs by itself. Without a GPU it runs over gloo.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

if find_spec("transformers") is None:
    raise SystemExit("this example needs transformers: pip install -e '.[test]'")

QWEN = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 256}
SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4}
TINY = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
}
BATCH, PROMPT = 2, 20


def build(device: torch.device, dtype: torch.dtype, **settings: Any) -> nn.Module:
    """The whole model with random weights from seed 0, the same on every rank."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    chosen = {"vocab_size": 256, "max_position_embeddings": 1 << 18, "pad_token_id": 0}
    chosen |= QWEN | SIZES | settings
    layers = ["full_attention"] * chosen["num_hidden_layers"]
    torch.manual_seed(0)
    model: nn.Module = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**chosen, layer_types=layers))
    return model.to(device, dtype).eval().requires_grad_(False)


def shard_by_its_plan(model: Any) -> nn.Module:
    """A copy of `model` sharded by `tp_plan="auto"`, by way of a checkpoint of the first rank."""
    from transformers.distributed import DistributedConfig

    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        if dist.get_rank() == 0:
            model.save_pretrained(own)
        dist.barrier()
        plan = DistributedConfig(tp_plan="auto")
        sharded: nn.Module = type(model).from_pretrained(
            folders[0], distributed_config=plan, dtype=model.dtype
        )
        dist.barrier()
    return sharded.eval().requires_grad_(False)


def shard_by_hand(model: Any, mesh: DeviceMesh) -> nn.Module:
    """`model` itself, sharded by `parallelize_module`; a single K/V head is kept on every rank."""
    inputs = ["self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj"]
    if model.config.num_key_value_heads % mesh.size() == 0:
        inputs += ["self_attn.k_proj", "self_attn.v_proj"]
    elif model.config.num_key_value_heads == 1:
        for layer in model.model.layers:
            layer.self_attn.num_key_value_groups //= mesh.size()
    else:
        raise ValueError(f"{mesh.size()} ranks cannot share {model.config.num_key_value_heads}")
    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in inputs}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)


@torch.no_grad()
def decode(
    model: Any,
    step: Callable[..., Any],
    prompt: Tensor,
    count: int,
    capacity: int = 64,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Prefill with `model`, then decode greedily with `step`, over a static cache.

    Args:
        prompt: `(B, T)` token ids.
        forced: `(B, count)` token ids to feed in place of the greedy ones.

    Returns:
        The tokens `(B, count)` and the logits that chose them, `(B, count, V)`.
    """
    from transformers import StaticCache

    # transformers 5.24 renamed it.
    names = inspect.signature(type(model).forward).parameters
    name = "cache" if "cache" in names else "past_key_values"
    cache = StaticCache(config=model.config, max_cache_len=capacity)
    seen = [model(prompt, use_cache=True, **{name: cache}).logits[:, -1]]
    tokens = [seen[-1].argmax(-1)]
    for index in range(count - 1):
        position = torch.full_like(prompt[:, :1], prompt.shape[1] + index)
        fed = tokens[-1] if forced is None else forced[:, index]
        output = step(fed[:, None], position_ids=position, use_cache=True, **{name: cache})
        seen.append(output.logits[:, -1])
        tokens.append(seen[-1].argmax(-1))
    return torch.stack(tokens, 1), torch.stack(seen, 1)


def start() -> torch.device:
    """Join the process group that torchrun describes; the device of this rank."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def main() -> None:
    """Decode with the whole model and with the sharded one, and compare."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "auto" if find_spec("accelerate") else "manual"
    options.add_argument(
        "--plan", choices=("auto", "manual"), default=default, help=f"default {default}"
    )
    options.add_argument("--tiny", action="store_true", help="a size for CPUs")
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options.add_argument("--backend", default="fusion_pass", help="of torch.compile")
    options.add_argument("--mode", help="of torch.compile, such as reduce-overhead")
    options.add_argument("--steps", type=int, default=8, help="tokens to decode")
    options.add_argument("--report", type=Path, help="folder that gets rank-<n>.json")
    arguments = options.parse_args()

    device = start()
    model = build(device, getattr(torch, arguments.dtype), **(TINY if arguments.tiny else {}))
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 256, (BATCH, PROMPT), generator=generator).to(device)
    expected, _ = decode(model, model, prompt, arguments.steps)
    if arguments.plan == "auto":
        sharded = shard_by_its_plan(model)
    else:
        sharded = shard_by_hand(model, init_device_mesh(device.type, (dist.get_world_size(),)))
    step = torch.compile(sharded, backend=arguments.backend, mode=arguments.mode)
    tokens, _ = decode(sharded, step, prompt, arguments.steps)

    answer = {
        "tokens equal": torch.equal(tokens, expected),
        "fusion_pass": dict(counters["fusion_pass"]),
    }
    rank = dist.get_rank()
    print(f"rank {rank}: tokens equal: {answer['tokens equal']}; {answer['fusion_pass']}")
    if arguments.report:
        (arguments.report / f"rank-{rank}.json").write_text(json.dumps(answer))
    # NCCL would wait for ever for captured graphs (--mode reduce-overhead).
    torch.compiler.reset()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # A thread of gloo that still drops the last collective's tensors needs the interpreter's lock,
    # and would abort the process if Python were taken down meanwhile.
    sys.stdout.flush()
    os._exit(0)
