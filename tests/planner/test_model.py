"""Sizes: parameters and operations against what is published and what transformers builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_3d.errors import ConfigurationError
from lightning_3d.planner.chain import DENSE, MOE, ShapeChain
from lightning_3d.planner.hf_config import read_hf_config, shape_of_hf_config
from lightning_3d.planner.model import ModelShape
from lightning_3d.planner.presets import PRESETS, preset
from lightning_3d.planner.work import Setting

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


SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "intermediate_size": 160,
}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "jamba", "mamba_d_state": 16}, "layers besides attention and MLP .mamba_d_state"),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
            "of kind linear_attention",
        ),
        ({"model_type": "albert"}, "is no decoder"),
        ({"model_type": "new", "architectures": ["NewForCTC"]}, "is no decoder"),
        ({"model_type": "opt", "word_embed_proj_dim": 32}, "embedding of word_embed_proj_dim 32 in front of"),
        ({"model_type": "wrapped", "text_config": {"model_type": "x", "ssm_state": 8}}, "layers besides attention"),
        ({"num_experts": 8, "mlp_only_layers": [2]}, "mlp_only_layers \\[2\\]"),
        ({"num_hidden_layers": "six"}, "num_hidden_layers in the model's config is 'six'"),
        ({"num_key_value_heads": [1, 2]}, "is \\[1, 2\\]; a whole number is expected"),
    ],
)
def test_what_is_no_transformer_of_equal_layers_is_not_read_as_one(config: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{why}.*--module"):
        shape_of_hf_config({**SIZES, **config}, "x")


def test_what_configs_say_in_their_own_way() -> None:
    """Counted by hand: key/value heads, layers with experts, biases, the mask."""
    falcon = {**SIZES, "model_type": "falcon", "num_kv_heads": 4, "multi_query": True}
    assert shape_of_hf_config(falcon).kv_heads == 1
    assert shape_of_hf_config({**falcon, "new_decoder_architecture": True}).kv_heads == 4
    sparse = {
        **SIZES,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 2,
    }
    shape = shape_of_hf_config({**sparse, "mlp_only_layers": [0, 1]})
    assert [shape.moe(layer) is not None for layer in range(6)] == [False, False, False, True, False, True]
    attention, mlp, experts = 4 * 64 * 64, 3 * 64 * 160, 8 * 3 * 64 * 32 + 64 * 8
    assert shape.params == 2 * 64 * 100 + 64 + 6 * (attention + 2 * 64) + 4 * mlp + 2 * experts
    assert shape.params - shape.active_params == 2 * 6 * 3 * 64 * 32
    works = ShapeChain(shape).works(Setting(tokens=16, seq=16, samples=1))
    assert [works[kind].params.experts for kind in (DENSE, MOE)] == [0, 8 * 3 * 64 * 32]
    plain = shape_of_hf_config(SIZES)
    assert shape_of_hf_config({**SIZES, "attention_bias": True}).params - plain.params == 6 * 4 * 64
    text = shape_of_hf_config({"model_type": "llava", "text_config": SIZES}, "llava")
    assert (text.params, text.name) == (plain.params, "llava (its language model alone)")
    encoder = shape_of_hf_config({**SIZES, "model_type": "bert", "max_position_embeddings": 32})
    assert encoder.flops_per_token(32, causal=True) == encoder.flops_per_token(32, causal=False)
