"""Sizes: parameters and operations against what is published and what transformers builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_3d.errors import ConfigurationError
from lightning_3d.planner.hf_config import read_hf_config, shape_of_hf_config
from lightning_3d.planner.model import ModelShape
from lightning_3d.planner.presets import PRESETS, preset

BILLIONS = {
    "gpt-1.7b": 1.652, "gpt-39b": 39.1, "gpt-145b": 145.6, "gpt-530b": 529.6, "gpt-1t": 1008.0, "gpt3-175b": 174.6,
    "llama2-7b": 6.738, "llama2-70b": 68.98, "llama3-8b": 8.030, "llama3-70b": 70.55, "llama3-405b": 405.85,
    "bloom-176b": 176.2, "mixtral-8x7b": 46.70, "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.1, "deepseek-v3": 671.0,
    "gpt2": 0.1244, "gpt2-xl": 1.558, "mistral-7b": 7.242,
}  # fmt: skip


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters_as_published(name: str) -> None:
    assert PRESETS[name].params / 1e9 == pytest.approx(BILLIONS[name], rel=0.004)


def test_active_parameters() -> None:
    assert preset("mixtral-8x7b").active_params / 1e9 == pytest.approx(12.88, rel=0.01)
    assert preset("deepseek-v3").active_params / 1e9 == pytest.approx(37.5, rel=0.02)


TINY = {
    "gpt2": {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 199, "n_positions": 32},
    "llama": {
        "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 199,
    },
    "gpt_neox": {
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 99,
        "tie_word_embeddings": False,
    },
    "mixtral": {
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 199, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", TINY)
def test_config_counts_what_transformers_builds(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **TINY[kind])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    shape = read_hf_config(tmp_path)
    built = sum(p.numel() for p in model.parameters())
    assert shape.params == pytest.approx(built, rel=0.003)  # norms of heads and biases of some kinds


def test_flops_per_token() -> None:
    """The conventions of section 2 of the published tables, for a GPT: 72 B s L h^2 (1 + s/6h + V/12Lh)."""
    h, layers, vocab, s = 12288, 96, 51200, 2048
    model = preset("gpt3-175b")
    full = 72 * layers * h * h * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert model.flops_per_token(s, causal=False) == pytest.approx(full, rel=0.001)
    half = 72 * layers * h * h * (1 + s / (12 * h) + vocab / (12 * layers * h))
    assert model.flops_per_token(s, causal=True) == pytest.approx(half, rel=0.001)
    untied = preset("llama2-7b")
    without, everything = (untied.flops_per_token(4096, causal=True, embeddings=e) for e in (False, True))
    assert everything - without == 6 * 32000 * 4096


def test_errors_name_the_near_ones() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'llama3-70b'"):
        preset("llama3-70")
    with pytest.raises(ConfigurationError, match="encoder and a decoder"):
        shape_of_hf_config({"is_encoder_decoder": True, "model_type": "t5"}, "t5")
    with pytest.raises(ConfigurationError, match="none of hidden_size"):
        shape_of_hf_config({"num_hidden_layers": 2}, "x")
    with pytest.raises(ConfigurationError, match="not a multiple of its 5 heads"):
        ModelShape("x", 2, 64, 256, 5, 5, 100)
    with pytest.raises(ConfigurationError, match="no file"):
        read_hf_config("nowhere/config.json")
