"""The models whose decode steps are timed: unmodified transformers classes, random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.models import cache_argument, static_cache

DTYPE = torch.bfloat16
PROMPT = 8
_SHARED: dict[str, Any] = {
    "vocab_size": 1024,
    "max_position_embeddings": 1 << 18,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_QWEN: dict[str, Any] = {
    **_SHARED,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
}


@dataclass(frozen=True)
class Model:
    """A model by the names of its transformers classes and the fields of its config."""

    name: str
    config_class: str
    model_class: str
    settings: dict[str, Any]
    gated_layers: int
    source: str

    @property
    def has_experts(self) -> bool:
        """Whether a router chooses experts for each token."""
        return "num_experts" in self.settings

    def build(self, device: torch.device, **changes: Any) -> torch.nn.Module:
        """The model in bfloat16 with random weights from seed 0; `changes` go over its settings."""
        import transformers

        config = getattr(transformers, self.config_class)(**{**self.settings, **changes})
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(DTYPE)
        try:
            with torch.device(device):
                model: torch.nn.Module = getattr(transformers, self.model_class)(config)
        finally:
            torch.set_default_dtype(default)
        # Rotary tables made on the meta or default device follow here.
        return model.to(device).eval().requires_grad_(False)


MODELS = (
    Model(
        "dense",
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            **_QWEN,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention"] * 4,
        },
        4,
        "Qwen3.5 without its linear layers: attention of Qwen/Qwen3.5-35B-A3B, hidden 1024",
    ),
    Model(
        "hybrid",
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            **_QWEN,
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_hidden_layers": 8,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        },
        2,
        "Qwen3.5 with three linear layers to each attention, attention of Qwen/Qwen3.5-35B-A3B",
    ),
    Model(
        "moe",
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {
            **_QWEN,
            "hidden_size": 2048,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        1,
        "Qwen/Qwen3.5-35B-A3B with 4 layers and 64 experts",
    ),
    Model(
        "afmoe",
        "AfmoeConfig",
        "AfmoeForCausalLM",
        {
            **_SHARED,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 4,
            "num_dense_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "moe_intermediate_size": 256,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "sliding_window": 2048,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
        4,
        "arcee-ai/Trinity-Nano-Preview with 4 layers and 64 experts",
    ),
)


def named(name: str) -> Model:
    """The model of this name. Raises KeyError, listing the names, for another."""
    for model in MODELS:
        if model.name == name:
            return model
    raise KeyError(f"{name} is none of {', '.join(m.name for m in MODELS)}")


class Decode:
    """One decode step of a model over a static cache that is full of random K and V.

    The cache is filled by writing into its tensors, since prefilling 131072 tokens takes minutes.
    """

    def __init__(self, model: torch.nn.Module, batch: int, capacity: int) -> None:
        device = next(model.parameters()).device
        self.model = model
        self.capacity = capacity
        self.cache: Any = static_cache(model, capacity)
        self._name = cache_argument(model)
        generator = torch.Generator(device).manual_seed(1)
        vocabulary = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
        prompt = torch.randint(0, vocabulary, (batch, PROMPT), device=device, generator=generator)
        # Makes the cache's tensors, and the states of linear layers.
        model(prompt, use_cache=True, **{self._name: self.cache})
        for layer in self._attention_layers():
            layer.keys.normal_(generator=generator)
            layer.values.normal_(generator=generator)
        self._state = [(tensor, tensor.clone()) for tensor in self._carried_state()]
        self._token = prompt[:, :1].contiguous()
        self._position = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.live = PROMPT

    def prepare(self) -> None:
        """Set every layer's length back to `live` - 1, so that the step attends to `live` keys."""
        for layer in self._attention_layers():
            # A sliding layer counts on the device only until its window is full.
            layer.cumulative_length.fill_(min(self.live, layer.max_cache_len) - 1)
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = self.live - 1

    def restore(self) -> None:
        """Undo what steps did to states that are no cache: two steps then give the same logits."""
        for tensor, initial in self._state:
            tensor.copy_(initial)

    def set_live(self, live: int) -> None:
        """From now on a step attends to `live` keys, its own among them."""
        if not 1 <= live <= self.capacity:
            raise ValueError(f"{live} live tokens do not fit a capacity of {self.capacity}")
        self.live = live
        self._position.fill_(live - 1)
        self.prepare()

    def step(self, model: Callable[..., Any]) -> Tensor:
        """Logits (B, 1, V) of one step of `model`, compiled or not; the cache grows by one."""
        output = model(
            self._token,
            position_ids=self._position,
            use_cache=True,
            **{self._name: self.cache},
        )
        logits: Tensor = output.logits
        return logits

    def _attention_layers(self) -> list[Any]:
        return [layer for layer in self.cache.layers if getattr(layer, "keys", None) is not None]

    def _carried_state(self) -> list[Tensor]:
        """Tensors that a step changes for good: linear layers' states, and windows that roll."""
        carried: list[Tensor] = []
        for layer in self.cache.layers:
            if hasattr(layer, "cumulative_length_int"):
                carried += [layer.keys, layer.values]
            for states in ("conv_states", "recurrent_states"):
                carried += [t for t in getattr(layer, states, {}).values() if t is not None]
        return carried


def cache_bytes(model: torch.nn.Module, batch: int, capacity: int) -> tuple[int, int]:
    """Bytes of a model's static cache, and of one layer's K and V repeated per query head."""
    config: Any = model.config
    row = 2 * batch * config.head_dim * DTYPE.itemsize
    total = repeated = 0
    for kind in config.layer_types:
        if kind == "linear_attention":
            continue
        length = min(capacity, config.sliding_window) if kind == "sliding_attention" else capacity
        total += row * config.num_key_value_heads * length
        repeated = max(repeated, row * config.num_attention_heads * length)
    return total, repeated
