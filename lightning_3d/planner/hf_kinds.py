"""WHICH Hugging Face configs are no transformer of equal layers?  They are refused, not read as one (no torch here).

A config names sizes, not what is made of them: that of a state-space model, of an encoder with shared layers or of a
speech model has the same keys as a decoder's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_3d.errors import ConfigurationError

_ATTENTIONS = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "attention",
    "global_attention",
    "local_attention",
}
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types", "attention_layers_block_type")
_OTHER_LAYERS = ("mamba_", "ssm_", "lru_", "linear_num_", "conv_L_", "attn_layer_period", "hybrid_override_pattern")
"""Beginnings of keys of layers that are no attention and MLP."""
_OTHER_KINDS = {
    "albert", "big_bird", "clip", "convbert", "data2vec-audio", "data2vec-text", "data2vec-vision", "deberta",
    "deberta-v2", "distilbert", "electra", "ernie", "esm", "flaubert", "funnel", "hubert", "layoutlm", "layoutlmv2",
    "layoutlmv3", "longformer", "luke", "mobilebert", "modernbert", "mpnet", "nystromformer", "perceiver", "reformer",
    "rembert", "roformer", "sew", "siglip", "squeezebert", "unispeech", "wav2vec2", "wavlm", "xlm", "xlnet", "yoso",
}  # fmt: skip
_OTHER_HEADS = ("ForCTC", "ForImageClassification", "ForObjectDetection", "ForAudioClassification", "ForXVector")
_NARROW = ("embedding_size", "word_embed_proj_dim")


def check_is_transformer(config: Mapping[str, Any], name: str) -> None:
    """Refuse a config whose sizes would be read as something the model is not.

    Raises:
        ConfigurationError: With what it is, and the way out.
    """
    why = _other(config)
    if why:
        raise ConfigurationError(
            f"model {name!r} ({config.get('model_type', 'of no model_type')}) {why}; a config.json of a decoder-only "
            "transformer is expected. Plan it as a module: lightning-3d plan --module FILE.py:FACTORY follows its own "
            "step on the meta device."
        )


def _other(config: Mapping[str, Any]) -> str | None:
    if config.get("is_encoder_decoder"):
        return "has an encoder and a decoder"
    heads = [arch for arch in config.get("architectures") or () if str(arch).endswith(_OTHER_HEADS)]
    if heads or config.get("model_type") in _OTHER_KINDS:
        return "is no decoder"
    kinds = {kind for key in _LAYER_LISTS for kind in config.get(key) or () if isinstance(kind, str)}
    if kinds - _ATTENTIONS:
        return f"has layers of kind {', '.join(sorted(kinds - _ATTENTIONS))}"
    keys = sorted(key for key, value in config.items() if str(key).startswith(_OTHER_LAYERS) and value is not None)
    if keys:
        return f"has layers besides attention and MLP ({', '.join(keys[:3])})"
    hidden = config.get("hidden_size")
    for key in _NARROW:
        if hidden is not None and config.get(key) not in (None, hidden):
            return f"has an embedding of {key} {config[key]} in front of layers of size {hidden}"
    return None
