"""Every gated-attention model of transformers, built small with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from tests.models import cache_argument, greedy, static_cache

VOCABULARY = 256
CAPACITY = 64
STEPS = 4


@dataclass(frozen=True)
class Family:
    """One model family and what becomes of its gated softmax attentions.

    Attributes:
        name: the family, as transformers spells it, with the variant where there are several.
        build: makes the model: two layers or so, float32, random weights from seed 0.
        gate: the gate in the words of the model's code.
        implementations: every `attn_implementation` that the family has a mask and a kernel for;
            the first is the family's default.
        gated_layers: gated softmax attentions of one decode step.
        impossible: by implementation, or for `"all"`, why none of them can ever fuse.
        pending: by implementation, which part of recognition is still missing.
        note: what else sets the family apart.
    """

    name: str
    build: Callable[[], Module]
    gate: str
    implementations: tuple[str, ...]
    gated_layers: int
    note: str = ""


class TextDecoder(Module):
    """A text model that transformers gives no language-model head, with one."""

    def __init__(self, text: Module) -> None:
        super().__init__()
        self.text = text
        self.config: Any = text.config
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


def _qwen3_next() -> Module:
    import transformers

    return transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(**_config(**_SHARED_EXPERT, **_HYBRID))
    )


def _qwen3_5() -> Module:
    import transformers

    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**_config(**_HYBRID)))


def _qwen3_5_vision() -> Module:
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


def _qwen3_5_moe() -> Module:
    import transformers

    settings = _config(**_SHARED_EXPERT, layer_types=["full_attention"] * 2)
    del settings["intermediate_size"]
    return transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**settings))


def _qwen4_exp() -> Module:
    import transformers

    settings = _config(
        **_SHARED_EXPERT,
        **_LINEAR,
        layer_types=["linear_attention", "indexed_attention"],
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


def _afmoe() -> Module:
    import transformers

    config = transformers.AfmoeConfig(
        **_config(**_EXPERTS, **_WINDOWED, num_dense_layers=1, num_shared_experts=1)
    )
    return transformers.AfmoeForCausalLM(config)


def _step3p7() -> Module:
    from transformers.models.step3p7 import configuration_step3p7, modeling_step3p7

    config = configuration_step3p7.Step3p7TextConfig(
        **_config(
            **_WINDOWED,
            num_sliding_attention_heads=8,
            mlp_layer_types=["dense", "sparse"],
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            share_expert_dim=32,
        )
    )
    return TextDecoder(modeling_step3p7.Step3p7TextModel(config))


def _hrm_text() -> Module:
    import transformers

    settings = _config(num_hidden_layers=1, H_cycles=2, L_cycles=1)
    del settings["num_key_value_heads"]
    return transformers.HrmTextForCausalLM(transformers.HrmTextConfig(**settings))


def _muse_glimmer() -> Module:
    from transformers.models.muse_glimmer import (
        configuration_muse_glimmer,
        modeling_muse_glimmer,
    )

    config = configuration_muse_glimmer.MuseGlimmerTextConfig(**_config(**_WINDOWED))
    return TextDecoder(modeling_muse_glimmer.MuseGlimmerTextModel(config))


def _axk2() -> Module:
    import transformers

    return transformers.AXK2ForCausalLM(
        transformers.AXK2Config(**_config(**_LATENT, gated_norm_rank=8))
    )


def _hy_v4() -> Module:
    import transformers

    config = transformers.HYV4Config(**_config(**_LATENT, hc_mult=2, learnable_sink_init=0.5))
    return transformers.HYV4ForCausalLM(config)


def _neomme() -> Module:
    import transformers

    config = transformers.NeoMMEConfig(
        **_config(layer_types=["sliding_attention", "full_attention"], sliding_window=8),
        embedding_rank=32,
    )
    return transformers.NeoMMEForMaskedLM(config)


SDPA = ("sdpa", "eager")
FLEX = ("sdpa", "eager", "flex_attention")

FAMILIES = (
    Family("qwen3_next", _qwen3_next, "", SDPA, 1),
    Family("qwen3_5", _qwen3_5, "", SDPA, 1),
    Family("qwen3_5 (vision-language)", _qwen3_5_vision, "", SDPA, 2),
    Family("qwen3_5_moe", _qwen3_5_moe, "", SDPA, 2),
    Family("qwen4_exp", _qwen4_exp, "", SDPA, 1),
    Family("afmoe", _afmoe, "", FLEX, 2),
    Family("step3p7", _step3p7, "", FLEX, 2),
    Family("hrm_text", _hrm_text, "", FLEX, 4),
    Family("muse_glimmer", _muse_glimmer, "", FLEX, 2),
    Family("axk2", _axk2, "", SDPA, 2),
    Family("hy_v4", _hy_v4, "", ("eager",), 2),
    Family("neomme", _neomme, "", FLEX, 2),
)


def build(family: Family, implementation: str) -> Module:
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
