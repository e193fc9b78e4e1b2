"""More Hugging Face models: other attention layouts, several towers, experts, latent attention, adapters (peft)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import transformers as T
from torch import Tensor, nn

from tests.tensor.hf_models import _SIZES, language_model, llama
from tests.tensor.models import VOCABULARY, Step, like, tokens, values

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def opt() -> nn.Module:
    config = T.OPTConfig(**_SIZES, ffn_dim=64, num_attention_heads=4, word_embed_proj_dim=32, dropout=0.0)
    return T.OPTForCausalLM(config)


def bloom() -> nn.Module:
    """Fused q, k, v, interleaved per head; attention biased by a table of slopes; its own autograd.Function."""
    return T.BloomForCausalLM(T.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=VOCABULARY))


def gpt_neox() -> nn.Module:
    config = T.GPTNeoXConfig(**_SIZES, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0)
    return T.GPTNeoXForCausalLM(config)


def phi3(**changes: Any) -> nn.Module:
    """Fused q, k, v of unequal sizes and fused gate, up."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0, **changes}
    return T.Phi3ForCausalLM(T.Phi3Config(**_SIZES, **sizes))


def qwen2_moe() -> nn.Module:
    """Experts, and one expert that all tokens share, with a gate."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return T.Qwen2MoeForCausalLM(
        T.Qwen2MoeConfig(**_SIZES, **heads, **_EXPERTS, shared_expert_intermediate_size=64, decoder_sparse_step=1)
    )


def qwen3_moe() -> nn.Module:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    return T.Qwen3MoeForCausalLM(T.Qwen3MoeConfig(**_SIZES, **heads, **_EXPERTS, decoder_sparse_step=1))


def deepseek_v3() -> nn.Module:
    """Multi-head latent attention, a dense layer, then experts with a shared one."""
    config = T.DeepseekV3Config(
        **_SIZES,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )
    return T.DeepseekV3ForCausalLM(config)


def whisper() -> nn.Module:
    """Convolutions over a spectrogram, encoder, decoder with cross-attention, learned positions, tied head."""
    config = T.WhisperConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        vocab_size=VOCABULARY,
        max_source_positions=10,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.0,
    )
    return T.WhisperForConditionalGeneration(config)


def transcribe(model: Any) -> Tensor:
    return model(input_features=like(model, values(2, 8, 20)), labels=tokens(VOCABULARY, 2, 7)).loss


def clip() -> nn.Module:
    """Two towers, and a loss over all pairs of the batch."""
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**tower, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1}
    vision = {**tower, "image_size": 16, "patch_size": 4}
    return T.CLIPModel(T.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def contrast(model: Any) -> Tensor:
    words, pixels = tokens(VOCABULARY, 3, 8), like(model, values(3, 3, 16, 16))
    return model(input_ids=words, pixel_values=pixels, return_loss=True).loss


def llama_with_adapters() -> nn.Module:
    """peft: low-rank adapters on column layers (q, v, up) and on row layers (o, down); the rest is frozen."""
    import peft  # takes seconds

    where = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=where, lora_dropout=0.0, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks for what transformers has renamed
        return peft.get_peft_model(llama(num_key_value_heads=4), config)


MORE: dict[str, tuple[Callable[[], nn.Module], Step, float]] = {
    "opt": (opt, language_model, 0.95),
    "bloom": (bloom, language_model, 0.95),
    "gpt_neox": (gpt_neox, language_model, 0.95),
    "phi3": (phi3, language_model, 0.95),
    "phi3_gqa": (lambda: phi3(num_key_value_heads=2), language_model, 0.95),
    "qwen2_moe": (qwen2_moe, language_model, 0.95),
    "qwen3_moe": (qwen3_moe, language_model, 0.95),
    "deepseek_v3": (deepseek_v3, language_model, 0.90),
    "whisper": (whisper, transcribe, 0.85),
    "clip": (clip, contrast, 0.85),
    "lora": (llama_with_adapters, language_model, 0.90),
}
