"""Every gated-attention model of transformers, built small with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from tests.models import cache_argument, greedy, static_cache

VOCABULARY = 256
CAPACITY = 64
STEPS = 3


@dataclass(frozen=True)
class Family:
    """One model family of transformers, built small.

    Attributes:
        name: the family as transformers spells it, with the variant where there are several.
        build: makes the model, in float32.
        gate: how the model's code spells the gate.
        implementations: every `attn_implementation` that the family supports, its default first.
        gated_layers: gated softmax attentions of one forward.
        note: what else matters to the fusion.
    """

    name: str
    build: Callable[[], Any]
    gate: str
    implementations: tuple[str, ...]
    gated_layers: int
    note: str = ""


class TextDecoder(Module):
    """A text model that transformers gives no language-model head, with one."""

    def __init__(self, text: Any) -> None:
        super().__init__()
        self.text = text
        self.config = text.config
        self.head = Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        self._cache_argument = cache_argument(text)

    def forward(self, input_ids: Tensor, cache: Any = None, **keywords: Any) -> Any:
        """Logits `(B, T, V)` of `input_ids` `(B, T)`."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        states = self.text(input_ids, **{self._cache_argument: cache}, **keywords)
        return CausalLMOutputWithPast(logits=self.head(states.last_hidden_state))

    def set_attn_implementation(self, implementation: str) -> None:
        """What transformers' own models have under this name."""
        self.text.set_attn_implementation(implementation)

    def set_experts_implementation(self, implementation: str) -> None:
        """What transformers' own models have under this name."""
        self.text.set_experts_implementation(implementation)


def _config(**settings: Any) -> dict[str, Any]:
    """Settings that most families share, changed by `settings`."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    } | settings


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED_EXPERT = _EXPERTS | {"shared_expert_intermediate_size": 32}
_LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_HYBRID = _LINEAR | {"layer_types": ["linear_attention", "full_attention"]}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "index_topk": 6,
    "index_head_dim": 32,
    "index_n_heads": 2,
}
_WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def _qwen3_next() -> Any:
    import transformers

    return transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(**_config(**_SHARED_EXPERT, **_HYBRID))
    )


def _qwen3_5() -> Any:
    import transformers

    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**_config(**_HYBRID)))


def _qwen3_5_vision() -> Any:
    import transformers

    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
    }
    config = transformers.Qwen3_5Config(
        text_config=_config(layer_types=["full_attention"] * 2),
        vision_config=vision,
        image_token_id=VOCABULARY - 1,
        video_token_id=VOCABULARY - 2,
        vision_start_token_id=VOCABULARY - 3,
        vision_end_token_id=VOCABULARY - 4,
    )
    return transformers.Qwen3_5ForConditionalGeneration(config)


def _qwen3_5_moe() -> Any:
    import transformers

    settings = _config(**_SHARED_EXPERT, layer_types=["full_attention"] * 2)
    del settings["intermediate_size"]
    return transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**settings))


def _qwen4_exp() -> Any:
    import transformers

    settings = _config(
        **_SHARED_EXPERT,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        hc_count=2,
        hc_lowrank=16,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=32,
        indexer_budget=8,
        indexer_compress_ratio=2,
    )
    del settings["intermediate_size"]
    return transformers.Qwen4ExpForCausalLM(transformers.Qwen4ExpTextConfig(**settings))


def _afmoe() -> Any:
    import transformers

    config = transformers.AfmoeConfig(
        **_config(**_EXPERTS, **_WINDOWED, num_dense_layers=1, num_shared_experts=1)
    )
    return transformers.AfmoeForCausalLM(config)


def _step3p7() -> Any:
    from transformers.models.step3p7 import configuration_step3p7, modeling_step3p7

    config = configuration_step3p7.Step3p7TextConfig(
        **_config(
            **_WINDOWED,
            num_sliding_attention_heads=8,
            mlp_layer_types=["dense", "dense"],
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            share_expert_dim=32,
        )
    )
    return TextDecoder(modeling_step3p7.Step3p7TextModel(config))


def _hrm_text() -> Any:
    import transformers

    settings = _config(num_hidden_layers=1, H_cycles=2, L_cycles=1)
    del settings["num_key_value_heads"]
    return transformers.HrmTextForCausalLM(transformers.HrmTextConfig(**settings))


def _muse_glimmer() -> Any:
    from transformers.models.muse_glimmer import (
        configuration_muse_glimmer,
        modeling_muse_glimmer,
    )

    config = configuration_muse_glimmer.MuseGlimmerTextConfig(**_config(**_WINDOWED))
    return TextDecoder(modeling_muse_glimmer.MuseGlimmerTextModel(config))


def _axk2() -> Any:
    import transformers

    return transformers.AXK2ForCausalLM(
        transformers.AXK2Config(**_config(**_LATENT, gated_norm_rank=8))
    )


def _hy_v4() -> Any:
    import transformers

    config = transformers.HYV4Config(**_config(**_LATENT, hc_mult=2, learnable_sink_init=0.5))
    return transformers.HYV4ForCausalLM(config)


def _neomme() -> Any:
    import transformers

    config = transformers.NeoMMEConfig(
        **_config(num_hidden_layers=1, layer_types=["full_attention"], embedding_rank=32)
    )
    return transformers.NeoMMEForMaskedLM(config)


_CHUNK = "second half of every head of q_proj, flattened to (B, Q, Hq * D)"
_PROJECTION = "own projection, (B, Q, Hq * D)"
_WITHOUT_FLEX = ("sdpa", "eager")
_WITH_FLEX = ("sdpa", "eager", "flex_attention")

FAMILIES = (
    Family(
        "qwen3_next",
        _qwen3_next,
        _CHUNK,
        _WITHOUT_FLEX,
        1,
        "Its other layers are gated linear attention.",
    ),
    Family(
        "qwen3_5",
        _qwen3_5,
        _CHUNK,
        _WITHOUT_FLEX,
        1,
        "Its other layers are gated linear attention.",
    ),
    Family(
        "qwen3_5 (vision-language)",
        _qwen3_5_vision,
        _CHUNK,
        _WITHOUT_FLEX,
        2,
        "Fed with text.",
    ),
    Family("qwen3_5_moe", _qwen3_5_moe, _CHUNK, _WITHOUT_FLEX, 2),
    Family(
        "qwen4_exp",
        _qwen4_exp,
        _CHUNK,
        _WITHOUT_FLEX,
        1,
        "An indexer picks the keys; its loops break the graph before the attention.",
    ),
    Family("afmoe", _afmoe, _PROJECTION, _WITH_FLEX, 2, "Sliding and full layers."),
    Family(
        "step3p7",
        _step3p7,
        "one logit a head, (B, Q, Hq, 1)",
        _WITH_FLEX,
        2,
        "Text model; sliding layers have more heads.",
    ),
    Family(
        "hrm_text",
        _hrm_text,
        "own projection, (B, Q, Hq, D), left operand",
        _WITH_FLEX,
        4,
        "Two layers run twice each.",
    ),
    Family(
        "muse_glimmer", _muse_glimmer, _PROJECTION, _WITH_FLEX, 2, "Text model; sliding and full."
    ),
    Family(
        "axk2",
        _axk2,
        "slice of a shared projection; sigmoid and product in float32",
        _WITHOUT_FLEX,
        2,
        "Latent attention, D != Dv; an indexer picks the keys.",
    ),
    Family(
        "hy_v4",
        _hy_v4,
        "own projection, (B, Q, Hq, Dv)",
        ("eager",),
        2,
        "Latent attention with a sink a head; an indexer picks the keys.",
    ),
    Family("neomme", _neomme, _PROJECTION, _WITH_FLEX, 1, "An encoder."),
)

# How many attentions of one forward fuse, by family and implementation.
FUSED: dict[str, dict[str, int]] = {
    "qwen3_next": {"sdpa": 1, "eager": 1},
    "qwen3_5": {"sdpa": 1, "eager": 1},
    "qwen3_5 (vision-language)": {"sdpa": 2, "eager": 2},
    "qwen3_5_moe": {"sdpa": 2, "eager": 2},
    "qwen4_exp": {"sdpa": 1, "eager": 0},
    "afmoe": {"sdpa": 2, "eager": 2, "flex_attention": 2},
    "step3p7": {"sdpa": 2, "eager": 2, "flex_attention": 2},
    "hrm_text": {"sdpa": 4, "eager": 4, "flex_attention": 4},
    "muse_glimmer": {"sdpa": 2, "eager": 2, "flex_attention": 2},
    "axk2": {"sdpa": 2, "eager": 2},
    "hy_v4": {"eager": 2},
    "neomme": {"sdpa": 0, "eager": 0, "flex_attention": 0},
}

# Why that is fewer than the family has.
WHY_NOT: dict[str, str] = {
    "qwen4_exp": "With eager attention the break makes the attention weights a graph output.",
    "neomme": "What is gated is the output less its projection on V, which is no attention.",
}


def build(family: Family, implementation: str) -> Any:
    """The family's model with the given attention, for inference."""
    torch.manual_seed(0)
    model = family.build()
    model.set_attn_implementation(implementation)
    return model.requires_grad_(False).eval()


def prompt() -> Tensor:
    """Token ids `(2, 7)`, none of them special."""
    return torch.randint(1, VOCABULARY - 8, (2, 7), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def decode(model: Module, compiled: Callable[..., Any] | None = None) -> tuple[Tensor, Tensor]:
    """Greedy tokens and logits; an encoder has no cache, and encodes the prompt instead."""
    if not hasattr(model, "generate") and not isinstance(model, TextDecoder):
        logits = (model if compiled is None else compiled)(prompt()).logits
        return logits.argmax(-1), logits
    return greedy(model, prompt(), STEPS, static_cache(model, CAPACITY), compiled)


def table() -> str:
    """What fuses in every family, as the table of docs/models.md."""
    lines = [
        "| Model | Gate | sdpa | eager | flex_attention | Remarks |",
        "|---|---|---|---|---|---|",
        *(_row(family) for family in FAMILIES),
    ]
    return "\n".join(lines) + "\n"


def _row(family: Family) -> str:
    fused = FUSED[family.name]
    cells = [
        f"{fused[implementation]}/{family.gated_layers}" if implementation in fused else "-"
        for implementation in _WITH_FLEX
    ]
    remarks = f"{family.note} {WHY_NOT.get(family.name, '')}".strip()
    return f"| {family.name} | {family.gate} | {' | '.join(cells)} | {remarks} |"


if __name__ == "__main__":
    print(table(), end="")
