"""WHICH sizes does a Hugging Face `config.json` describe?  (no torch, no transformers here)"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_3d.errors import ConfigurationError
from lightning_3d.planner.model import Experts, Latent, ModelShape

_NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size", "padded_vocab_size"),
}
_WITHOUT_GATE = {
    "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "mpt", "falcon", "gpt_bigcode", "codegen", "phi", "nemotron",
    "starcoder2", "bert", "roberta", "megatron-bert", "stablelm_epoch", "gpt_neox_japanese",
}  # fmt: skip
_WITH_BIAS = {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "gpt_bigcode", "codegen", "phi", "starcoder2"}
_LEARNED = {"gpt2", "gpt_neo", "opt", "gpt_bigcode"}


def read_hf_config(path: str | Path) -> ModelShape:
    """The sizes in a `config.json`, or in the folder that holds one.

    Raises:
        ConfigurationError: There is no such file, it is no JSON object, or it lacks a size.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ConfigurationError(f"there is no file {str(file)!r}; give the path of a config.json.")
    try:
        config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{str(file)!r} is no JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"{str(file)!r} holds {type(config).__name__}, not the object of a model's config.")
    return shape_of_hf_config(config, config.get("_name_or_path") or file.parent.name or file.stem)


def shape_of_hf_config(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """The sizes in an HF config as a mapping (`PretrainedConfig.to_dict()`).

    Raises:
        ConfigurationError: A size is missing, or the model is no decoder-only transformer.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):  # a model of images and text: its decoder
        config = {**inner, "tie_word_embeddings": config.get("tie_word_embeddings", inner.get("tie_word_embeddings"))}
    kind = str(config.get("model_type", ""))
    if config.get("is_encoder_decoder"):
        raise ConfigurationError(
            f"model {name!r} ({kind}) has an encoder and a decoder; a config.json of a decoder-only transformer is "
            "expected. Plan it as a module: lightning-3d plan --module FILE.py:FACTORY runs it on the meta device."
        )
    sizes = {size: _first(config, names, name) for size, names in _NAMES.items()}
    hidden, heads = sizes["hidden"], sizes["heads"]
    gated = kind not in _WITHOUT_GATE
    ffn = _optional(config, ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")) or 4 * hidden
    if kind == "mpt":
        ffn = int(config.get("expansion_ratio", 4)) * hidden
    attn = config.get("attn_config")
    kv = _optional(config, ("num_key_value_heads", "num_kv_heads", "n_head_kv"))
    if kv is None and isinstance(attn, Mapping):
        kv = attn.get("kv_n_heads")
    if kv is None and config.get("multi_query"):
        kv = 1
    tied_unless_said = kind in {
        "gpt2",
        "bloom",
        "mpt",
        "opt",
        "falcon",
        "gpt_bigcode",
        "gpt_neo",
        "gemma",
        "gemma2",
        "gemma3_text",
    }
    tied = config.get("tie_word_embeddings")
    return ModelShape(
        name=name,
        layers=sizes["layers"],
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=int(kv or heads),
        vocab=sizes["vocab"],
        head_dim=int(config.get("head_dim") or 0),
        gated=gated,
        biases=kind in _WITH_BIAS,
        tied=tied_unless_said if tied is None else bool(tied),
        positions=_optional(config, ("max_position_embeddings", "n_positions")) or 0 if kind in _LEARNED else 0,
        experts=_experts(config),
        latent=_latent(config),
    )


def _experts(config: Mapping[str, Any]) -> Experts | None:
    count = _optional(config, ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"))
    if not count or count < 2:
        return None
    ffn = _optional(config, ("moe_intermediate_size", "intermediate_size"))
    assert ffn is not None
    shared = _optional(config, ("shared_expert_intermediate_size",)) or ffn * (config.get("n_shared_experts") or 0)
    dense = config.get("first_k_dense_replace") or 0
    active = _optional(config, ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "experts_per_token"))
    return Experts(count, int(active or 2), ffn, int(shared), int(dense))


def _latent(config: Mapping[str, Any]) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    return Latent(
        q_rank=int(config.get("q_lora_rank") or 0),
        kv_rank=int(config["kv_lora_rank"]),
        nope=int(config.get("qk_nope_head_dim", 128)),
        rope=int(config.get("qk_rope_head_dim", 64)),
        value=int(config.get("v_head_dim", 128)),
    )


def _optional(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    return next((int(config[n]) for n in names if config.get(n) is not None), None)


def _first(config: Mapping[str, Any], names: Sequence[str], model: str) -> int:
    found = _optional(config, names)
    if found is None:
        raise ConfigurationError(
            f"the config of {model!r} has none of {', '.join(names)}; without it nothing can be planned. Is it the "
            "config.json of a decoder-only transformer? Another model can be planned as a module (--module)."
        )
    return found
