"""WHICH models have a name?  Those of the published tables, and today's common ones (no torch here)."""

from __future__ import annotations

from lightning_3d.errors import ConfigurationError, near
from lightning_3d.planner.model import Experts, Latent, ModelShape


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int = 51200, positions: int = 2048) -> ModelShape:
    sizes = (name, layers, hidden, 4 * hidden, heads, heads, vocab)
    return ModelShape(*sizes, tied=True, positions=positions, dropout=True)


def _llama(
    name: str,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv: int,
    vocab: int,
    tied: bool = False,
    head_dim: int = 0,
) -> ModelShape:
    return ModelShape(
        name, layers, hidden, ffn, heads, kv, vocab, head_dim=head_dim, gated=True, biases=False, tied=tied
    )


def _mpt(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(name, layers, hidden, 4 * hidden, heads, heads, 50368, biases=False, tied=True)


_ALL = [
    # Narayanan et al. 2021 (SC'21), Table 1
    _gpt("gpt-1.7b", 24, 2304, 24),
    _gpt("gpt-3.6b", 30, 3072, 32),
    _gpt("gpt-7.5b", 36, 4096, 32),
    _gpt("gpt-18b", 40, 6144, 48),
    _gpt("gpt-39b", 48, 8192, 64),
    _gpt("gpt-76b", 60, 10240, 80),
    _gpt("gpt-145b", 80, 12288, 96),
    _gpt("gpt-310b", 96, 16384, 128),
    _gpt("gpt-530b", 105, 20480, 128),
    _gpt("gpt-1t", 128, 25600, 160),
    _gpt("gpt3-175b", 96, 12288, 96),
    _gpt("gpt-22b", 48, 6144, 64),  # Korthikanti et al. 2022
    _gpt("gpt2", 12, 768, 12, 50257, 1024),
    _gpt("gpt2-medium", 24, 1024, 16, 50257, 1024),
    _gpt("gpt2-large", 36, 1280, 20, 50257, 1024),
    _gpt("gpt2-xl", 48, 1600, 25, 50257, 1024),
    ModelShape("bloom-176b", 70, 14336, 57344, 112, 112, 250880, tied=True),
    _mpt("mpt-125m", 12, 768, 12),
    _mpt("mpt-760m", 24, 1536, 12),
    _mpt("mpt-3b", 32, 2560, 20),
    _mpt("mpt-13b", 40, 5120, 40),
    _mpt("mpt-70b", 80, 8192, 64),
    _llama("llama2-7b", 32, 4096, 11008, 32, 32, 32000),
    _llama("llama2-13b", 40, 5120, 13824, 40, 40, 32000),
    _llama("llama2-70b", 80, 8192, 28672, 64, 8, 32000),
    _llama("llama3-8b", 32, 4096, 14336, 32, 8, 128256),
    _llama("llama3-70b", 80, 8192, 28672, 64, 8, 128256),
    _llama("llama3-405b", 126, 16384, 53248, 128, 8, 128256),
    _llama("llama3.2-1b", 16, 2048, 8192, 32, 8, 128256, tied=True),
    _llama("llama3.2-3b", 28, 3072, 8192, 24, 8, 128256, tied=True),
    _llama("mistral-7b", 32, 4096, 14336, 32, 8, 32000),
    ModelShape(
        "mixtral-8x7b", 32, 4096, 14336, 32, 8, 32000, gated=True, biases=False, experts=Experts(8, 2, 14336)
    ),
    ModelShape(
        "qwen3-30b-a3b", 48, 2048, 6144, 32, 4, 151936, head_dim=128, gated=True, biases=False,
        experts=Experts(128, 8, 768),
    ),
    ModelShape(
        "qwen3-235b-a22b", 94, 4096, 12288, 64, 4, 151936, head_dim=128, gated=True, biases=False,
        experts=Experts(128, 8, 1536),
    ),
    ModelShape(
        "deepseek-v3", 61, 7168, 18432, 128, 128, 129280, head_dim=128, gated=True, biases=False,
        experts=Experts(256, 8, 2048, shared_ffn=2048, dense_layers=3), latent=Latent(1536, 512, 128, 64, 128),
    ),
]  # fmt: skip

PRESETS: dict[str, ModelShape] = {shape.name: shape for shape in _ALL}
"""Sizes by name, smallest letters."""
_SPELLINGS = {
    "llama3.1-8b": "llama3-8b",
    "llama3.1-70b": "llama3-70b",
    "llama3.1-405b": "llama3-405b",
    "gpt-3": "gpt3-175b",
    "bloom": "bloom-176b",
}


def preset(name: str) -> ModelShape:
    """The sizes of a named model.

    Raises:
        ConfigurationError: There is no such name.
    """
    key = name.lower().replace("_", "-").strip()
    key = _SPELLINGS.get(key, key)
    if key not in PRESETS:
        known = [*PRESETS, *_SPELLINGS]
        raise ConfigurationError(
            f"model {name!r} is neither a known name nor the path of a config.json.{near(key, known)} Known names: "
            f"{', '.join(PRESETS)}."
        )
    return PRESETS[key]
