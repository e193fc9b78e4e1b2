"""Hugging Face models with tiny random configurations (importing transformers takes seconds)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as T
from torch import Tensor, nn

from tests.tensor.models import VOCABULARY, Step, tokens, values

T.logging.set_verbosity_error()
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}


def language_model(model: Any) -> Tensor:
    index = tokens(VOCABULARY, 2, 10)
    return model(input_ids=index, labels=index).loss


def classify(model: Any) -> Tensor:
    pixels = values(2, 3, 16, 16).to(next(model.parameters()).dtype)
    return model(pixel_values=pixels, labels=torch.tensor([1, 3])).loss


def llama(**changes: Any) -> nn.Module:
    return T.LlamaForCausalLM(
        T.LlamaConfig(**{**_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, **changes})
    )


def gpt2(p: float = 0.0) -> nn.Module:
    config = T.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=64,
        resid_pdrop=p,
        attn_pdrop=p,
        embd_pdrop=p,
    )
    return T.GPT2LMHeadModel(config)


def bert(p: float = 0.0) -> nn.Module:
    config = T.BertConfig(**_SIZES, num_attention_heads=4, hidden_dropout_prob=p, attention_probs_dropout_prob=p)
    return T.BertForMaskedLM(config)


def t5(p: float = 0.0) -> nn.Module:
    config = T.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        vocab_size=VOCABULARY,
        dropout_rate=p,
        decoder_start_token_id=0,
    )
    return T.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = T.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return T.ViTForImageClassification(config)


def qwen3() -> nn.Module:
    config = T.Qwen3Config(**_SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    return T.Qwen3ForCausalLM(config)


def mixtral(**changes: Any) -> nn.Module:
    config = T.MixtralConfig(**_SIZES, num_attention_heads=4, num_key_value_heads=4, num_local_experts=4, **changes)
    return T.MixtralForCausalLM(config)


HF: dict[str, tuple[Callable[[], nn.Module], Step, float]] = {
    "llama": (llama, language_model, 0.98),
    "llama_kv1": (
        lambda: llama(num_key_value_heads=1, attn_implementation="eager", tie_word_embeddings=True),
        language_model,
        0.93,
    ),
    "gpt2": (gpt2, language_model, 0.91),
    "bert": (bert, language_model, 0.83),
    "t5": (t5, language_model, 0.98),
    "vit": (vit, classify, 0.84),
    "qwen3": (qwen3, language_model, 0.98),
    "mixtral": (mixtral, language_model, 0.98),
    "mixtral_eager": (lambda: mixtral(experts_implementation="eager"), language_model, 0.98),
}
