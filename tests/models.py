"""Unmodified transformers models with small random weights, and greedy decoding with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

FAMILIES = ("qwen3_5", "qwen3_next")


def build(family: str, **settings: Any) -> torch.nn.Module:
    """A causal language model of `family` whose layers are all gated softmax attention.

    `settings` are fields of the transformers config; weights are random from seed 0.
    """
    import transformers

    config_class, model_class = {
        "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
        "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
    }[family]
    defaults: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1 << 18,
    }
    if family == "qwen3_next":
        defaults |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        }
    chosen = defaults | settings
    chosen.setdefault("layer_types", ["full_attention"] * chosen["num_hidden_layers"])
    torch.manual_seed(0)
    model: torch.nn.Module = model_class(config_class(**chosen))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval()


def cache_argument(model: torch.nn.Module) -> str:
    """What the model's forward calls its K/V cache; transformers 5.24 renamed it."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def static_cache(model: torch.nn.Module, capacity: int) -> Any:
    """A static K/V cache of `capacity` tokens for `model`."""
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=capacity)


def greedy(
    model: torch.nn.Module,
    prompt: torch.Tensor,
    steps: int,
    cache: Any,
    compiled: Callable[..., Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy decoding by hand: prefill with `model`, then one token a step with `compiled`.

    Args:
        prompt: `(B, T)` token ids.

    Returns:
        The new tokens `(B, steps)` and the logits that chose the decoded ones, `(B, steps, V)`.
    """
    name = cache_argument(model)
    step = model if compiled is None else compiled
    position = prompt.shape[1]
    logits = model(prompt, use_cache=True, **{name: cache}).logits[:, -1]
    tokens, seen = [logits.argmax(-1)], [logits]
    for offset in range(steps - 1):
        ids = torch.tensor([[position + offset]], device=prompt.device)
        output = step(
            tokens[-1][:, None],
            position_ids=ids.expand(prompt.shape[0], 1),
            use_cache=True,
            **{name: cache},
        )
        seen.append(output.logits[:, -1])
        tokens.append(seen[-1].argmax(-1))
    return torch.stack(tokens, 1), torch.stack(seen, 1)


def dynamic_cache(model: torch.nn.Module) -> Any:
    """A K/V cache for `model` that grows by concatenation."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def in_float64(model: torch.nn.Module) -> torch.nn.Module:
    """`model` itself, converted to float64."""
    # The default, a grouped matmul, has no float64.
    model.set_experts_implementation("eager")
    return model.double()
