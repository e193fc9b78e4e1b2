"""WHAT does the sweep build?  Tiny random models of every causal language model, from its own config class."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

transformers.logging.set_verbosity_error()
NAMES = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 101  # odd: not divisible by 2 or 4

_WIDTH, _INNER, _HEADS, _LAYERS = 64, 128, 4, 2
SIZES: dict[str, Any] = {
    # widths
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "word_embed_proj_dim"), _WIDTH),
    **dict.fromkeys(("embedding_size",), _WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner"), _INNER),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_intermediate_size"), 32),
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), _HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "attention_heads"), _HEADS),
    "head_dim": 16,
    "rotary_dim": 8,
    # depth
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), _LAYERS),
    "encoder_layers": _LAYERS,
    # tables
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions"), 128),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id",), 2),
    "decoder_start_token_id": 1,
    # experts
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    # state spaces
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 8),
    # linear attention, indexers of sparse attention
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "index_n_heads"), _HEADS),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "index_head_dim"), 16),
    "index_topk": 8,
    # behaviour
    "sliding_window": 8,
    "is_decoder": True,
    "use_cache": False,
    **dict.fromkeys(("layerdrop", "decoder_layerdrop", "encoder_layerdrop"), 0.0),
}
"""Name of a setting -> tiny value. Only settings that the config class has are used."""

_DBRX = {
    "attn_config": {"kv_n_heads": 4, "clip_qkv": None},
    "ffn_config": {"ffn_hidden_size": _INNER, "moe_num_experts": 4, "moe_top_k": 2},
}
_GEMMA3N = {
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 0,
    "laurel_rank": 16,
    "num_hidden_layers": 5,
    "activation_sparsity_pattern": [0.0] * 5,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
}
_GEMMA4 = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16, "global_head_dim": 32}
_ALL_LAYERS = {"layers_block_type": ["mamba", "hybrid"], "num_hidden_layers": 2}

SPECIAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"layer_types": ["full_attention", "full_attention"]},
    "dbrx": _DBRX,
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma3n_text": _GEMMA3N,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_unified": {"text_config": _GEMMA4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "n_groups": 4, "chunk_size": 8},
    "mimo_v2_flash": {"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"]},
    "prophetnet": {
        **dict.fromkeys(("num_hidden_layers", "num_layers"), ...),
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
    },
    "reformer": {
        "attn_layers": ["local", "local"],  # the other kind draws its own seed for every hash
        "axial_pos_embds": False,
        "attention_head_size": 16,
        "feed_forward_size": _INNER,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
    },
    "rembert": {"output_embedding_size": _WIDTH, "input_embedding_size": _WIDTH},
    "xlnet": {"d_inner": _INNER, "max_position_embeddings": ...},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3, "n_mamba_heads": 2},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_ngroups": 4,
        "chunk_size": 8,
        "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
}
"""Architectures whose settings depend on each other in their own way; `...` leaves the class's default."""


def tiny_config(config_class: Any, special: dict[str, Any]) -> Any:
    """A config with tiny sizes, in the configs inside it too."""
    known = config_class()
    names = {f for c in config_class.__mro__ for f in getattr(c, "__dataclass_fields__", ())} | set(known.attribute_map)
    settings: dict[str, Any] = {k: v for k, v in SIZES.items() if k in names}
    for name in getattr(config_class, "sub_configs", {}):
        value = getattr(known, name, None)
        if value is not None and type(value).__name__ != "PreTrainedConfig":
            settings[name] = tiny_config(type(value), special.get(name, {}))
    settings.update((k, v) for k, v in special.items() if not (isinstance(v, dict) and k in settings))
    return config_class(**{k: v for k, v in settings.items() if v is not ...})


def build(name: str) -> nn.Module:
    """The architecture's causal language model with random weights, in training mode."""
    torch.manual_seed(0)
    config = tiny_config(CONFIG_MAPPING[name], SPECIAL.get(name, {}))
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.train()
    return model
