"""WHICH sizes does a Hugging Face `config.json` describe?  (no torch, no transformers here)"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_3d.errors import ConfigurationError
from lightning_3d.planner.hf_kinds import check_is_transformer
from lightning_3d.planner.model import Experts, Latent, ModelShape

_NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size", "padded_vocab_size"),
}
_ENCODERS = {"bert", "roberta", "xlm-roberta", "camembert", "megatron-bert"}
"""Encoders whose layers are those of a decoder, but for the mask."""
_WITHOUT_GATE = {
    "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "mpt", "falcon", "gpt_bigcode", "codegen", "phi", "nemotron",
    "starcoder2", "stablelm_epoch", "gpt_neox_japanese", "ctrl", *_ENCODERS,
}  # fmt: skip
_WITH_BIAS = {
    "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "gpt_bigcode", "codegen", "phi", "starcoder2", "ctrl",
    *_ENCODERS,
}  # fmt: skip
_LEARNED = {"gpt2", "gpt_neo", "opt", "gpt_bigcode", *_ENCODERS}
_TIED = {
    "gpt2", "bloom", "mpt", "opt", "falcon", "gpt_bigcode", "gpt_neo", "gemma", "gemma2", "gemma3_text", "ctrl",
    *_ENCODERS,
}  # fmt: skip
"""Kinds that share the head's weight with the embedding unless their config says no."""


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
        ConfigurationError: A size is missing, or the model is no transformer of equal layers.
    """
    check_is_transformer(config, name)
    inner = config.get("text_config")
    if isinstance(inner, Mapping):  # a model of images and text: its decoder
        config = {**inner, "tie_word_embeddings": config.get("tie_word_embeddings", inner.get("tie_word_embeddings"))}
        name = f"{name} (its language model alone)"
        check_is_transformer(config, name)
    for part in ("attn_config", "ffn_config"):
        if isinstance(config.get(part), Mapping):
            config = {**config[part], **config}
    kind = str(config.get("model_type", ""))
    sizes = {size: _first(config, names, name) for size, names in _NAMES.items()}
    hidden, heads = sizes["hidden"], sizes["heads"]
    ffn = _optional(
        config, ("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff")
    )
    if kind == "mpt":
        ffn = int(config.get("expansion_ratio", 4)) * hidden
    tied = config.get("tie_word_embeddings")
    return ModelShape(
        name=name,
        layers=sizes["layers"],
        hidden=hidden,
        ffn=ffn or 4 * hidden,
        heads=heads,
        kv_heads=_kv_heads(config, kind) or heads,
        vocab=sizes["vocab"],
        head_dim=_optional(config, ("head_dim",)) or 0,
        gated=kind not in _WITHOUT_GATE,
        biases=kind in _WITH_BIAS,
        tied=kind in _TIED if tied is None else bool(tied),
        positions=_optional(config, ("max_position_embeddings", "n_positions")) or 0 if kind in _LEARNED else 0,
        experts=_experts(config, kind, name),
        latent=_latent(config),
        attention_biases=config.get("attention_bias") is True and not config.get("kv_lora_rank"),
        causal=kind not in _ENCODERS,
    )


def _kv_heads(config: Mapping[str, Any], kind: str) -> int | None:
    if kind == "falcon" and not config.get("new_decoder_architecture"):  # num_kv_heads is only the new one's
        return 1 if config.get("multi_query", True) else None
    found = _optional(config, ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads"))
    return 1 if found is None and config.get("multi_query") else found


def _experts(config: Mapping[str, Any], kind: str, model: str) -> Experts | None:
    count = _optional(config, ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"))
    if not count or count < 2:
        return None
    ffn = _first(config, ("moe_intermediate_size", "intermediate_size", "ffn_hidden_size"), model)
    shared = _optional(config, ("shared_expert_intermediate_size",)) or ffn * (config.get("n_shared_experts") or 0)
    if kind == "llama4_text":
        shared = ffn
    active = _optional(config, ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "experts_per_token"))
    every = _optional(config, ("decoder_sparse_step", "interleave_moe_layer_step")) or 1
    dense = _optional(config, ("first_k_dense_replace",)) or len(config.get("mlp_only_layers") or ())
    if (
        list(config.get("mlp_only_layers") or ()) not in ([], list(range(dense)))
        or config.get("moe_layer_freq", 1) != 1
    ):
        raise ConfigurationError(
            f"in the config of {model!r} layers with and without experts take turns as mlp_only_layers "
            f"{config.get('mlp_only_layers')} and moe_layer_freq {config.get('moe_layer_freq')} say; a config.json can "
            "be planned if all layers have them, all but the first ones, or every n-th one. Plan it as a module "
            "(--module FILE.py:FACTORY)."
        )
    return Experts(count, active or 2, ffn, shared, dense, every)


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
    name = next((n for n in names if config.get(n) is not None), None)
    if name is None:
        return None
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationError(
            f"{name} in the model's config is {value!r}; a whole number is expected (one for all layers). A model "
            "whose layers differ can be planned as a module (--module FILE.py:FACTORY)."
        )
    return value


def _first(config: Mapping[str, Any], names: Sequence[str], model: str) -> int:
    found = _optional(config, names)
    if found is None:
        raise ConfigurationError(
            f"the config of {model!r} has none of {', '.join(names)}; without it nothing can be planned. Is it the "
            "config.json of a decoder-only transformer? Another model can be planned as a module (--module)."
        )
    return found
