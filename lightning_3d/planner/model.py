"""WHAT is computed?  The sizes of a decoder-only transformer: its parameters and operations (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.errors import ConfigurationError


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): keys and values come from one short vector.

    Attributes:
        q_rank: Size of the vector that queries come from; 0: they come from the hidden state.
        kv_rank: Size of the vector that keys and values come from.
        nope, rope: Parts of a head's query and key without and with position.
        value: Size of a head's value.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP.

    Attributes:
        count: Routed experts in a layer.
        active: How many of them a token visits.
        ffn: Inner size of one expert.
        shared_ffn: Inner size of the part that every token visits; 0: none.
        dense_layers: How many of the first layers have an ordinary MLP.
        every: Of the others, every n-th layer has experts, counted from the first layer of all (2: layers 1, 3,
            5, ... from 0).
    """

    count: int
    active: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    every: int = 1

    def of_layer(self, layer: int) -> bool:
        """Whether a layer has them."""
        return layer >= self.dense_layers and (layer + 1) % self.every == 0


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer.

    Attributes:
        name: For the reader.
        layers, hidden, ffn, heads, kv_heads, vocab: The usual sizes; `ffn` is the inner size of the MLP.
        head_dim: Size of a head; 0: `hidden / heads`.
        gated: Whether the MLP has three matrices (SwiGLU, GeGLU) instead of two.
        biases: Whether linear layers have biases (then norms are LayerNorms, with a bias, too).
        attention_biases: Whether those of attention have them at least.
        tied: Whether the head shares the embedding's weight.
        positions: Number of learned positions; 0: rotary, ALiBi or none.
        dropout: Whether activations keep dropout masks.
        experts: A mixture of experts, if it has one.
        latent: Latent attention, if it has it.
        causal: Whether a token attends to those before it only (an encoder's attend to all).
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 0
    gated: bool = False
    biases: bool = True
    tied: bool = False
    positions: int = 0
    dropout: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    attention_biases: bool = False
    causal: bool = True

    def __post_init__(self) -> None:
        for size in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab"):
            value = getattr(self, size)
            if not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"model {self.name!r}: {size} is {value!r}; it must be a positive integer.")
        if not self.head_dim:
            if self.hidden % self.heads:
                raise ConfigurationError(
                    f"model {self.name!r}: hidden size {self.hidden} is not a multiple of its {self.heads} heads, and "
                    "head_dim is not given. Give head_dim, or correct the two sizes."
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if self.heads % self.kv_heads:
            raise ConfigurationError(
                f"model {self.name!r}: {self.heads} heads cannot share {self.kv_heads} key/value heads evenly."
            )

    @property
    def q_dim(self) -> int:
        """Features of all queries."""
        return self.heads * (self.latent.nope + self.latent.rope if self.latent else self.head_dim)

    @property
    def v_dim(self) -> int:
        """Features of what attention gives, before the output matrix."""
        return self.heads * (self.latent.value if self.latent else self.head_dim)

    @property
    def kv_dim(self) -> int:
        """Features of all keys (as many again for the values)."""
        return self.kv_heads * self.head_dim

    @property
    def attention_matrices(self) -> tuple[tuple[int, int], ...]:
        """The matrices of attention that every token passes, `(in, out)`: first those before it, last the one after."""
        h = self.hidden
        if self.latent is None:
            return ((h, self.q_dim + 2 * self.kv_dim), (self.v_dim, h))
        latent = self.latent
        queries = ((h, latent.q_rank), (latent.q_rank, self.q_dim)) if latent.q_rank else ((h, self.q_dim),)
        keys = (h, latent.kv_rank + latent.rope), (latent.kv_rank, self.heads * (latent.nope + latent.value))
        return (*queries, *keys, (self.v_dim, h))

    def mlp_params(self, ffn: int) -> int:
        """Weights of one MLP of this inner size."""
        return (3 if self.gated else 2) * self.hidden * ffn

    @property
    def attention_params(self) -> int:
        """Weights of one layer's attention."""
        weights = sum(rows * columns for rows, columns in self.attention_matrices)
        biases = self.biases or self.attention_biases
        return weights + (sum(columns for _, columns in self.attention_matrices) if biases else 0)

    @property
    def norm_params(self) -> int:
        """Weights of one layer's two norms: never divided by tensor parallelism."""
        return 2 * self.hidden * (2 if self.biases else 1)

    def moe(self, layer: int) -> Experts | None:
        """The experts of a layer, if it has any."""
        return self.experts if self.experts is not None and self.experts.of_layer(layer) else None

    def dense_mlp_params(self, layer: int) -> int:
        """Weights of what every token passes in the MLP's place (with experts: the router and the shared part)."""
        experts = self.moe(layer)
        if experts is None:
            bias = (self.ffn * (2 if self.gated else 1) + self.hidden) if self.biases else 0
            return self.mlp_params(self.ffn) + bias
        return self.hidden * experts.count + (self.mlp_params(experts.shared_ffn) if experts.shared_ffn else 0)

    def expert_params(self, layer: int) -> int:
        """Weights of all routed experts of a layer."""
        experts = self.moe(layer)
        return experts.count * self.mlp_params(experts.ffn) if experts is not None else 0

    def layer_params(self, layer: int = -1) -> int:
        """All weights of one layer (-1: the last)."""
        layer %= self.layers
        return self.attention_params + self.norm_params + self.dense_mlp_params(layer) + self.expert_params(layer)

    @property
    def embedding_params(self) -> int:
        """Weights of the token embedding."""
        return self.vocab * self.hidden

    @property
    def params(self) -> int:
        """All parameters; a tied weight counts once."""
        total = sum(self.layer_params(layer) for layer in range(self.layers))
        total += self.embedding_params * (1 if self.tied else 2) + self.positions * self.hidden
        return total + self.hidden * (2 if self.biases else 1)

    @property
    def active_params(self) -> int:
        """Parameters that one token passes (experts it does not visit left out)."""
        if self.experts is None:
            return self.params
        idle = self.experts.count - self.experts.active
        layers = sum(map(self.experts.of_layer, range(self.layers)))
        return self.params - layers * idle * self.mlp_params(self.experts.ffn)

    def flops_per_token(self, seq: int, *, causal: bool, embeddings: bool = False) -> float:
        """Operations of the model, forward and backward, per token: `6 P + 12 L h s` or, causal, `6 P + 6 L h s`.

        Args:
            seq: Sequence length.
            causal: Count the half of attention that a causal mask leaves (Megatron-Bridge), or all of it (PaLM).
            embeddings: Count the embedding's weight too (llm-foundry), although nothing is multiplied with it.
        """
        params = self.active_params - (0 if embeddings or self.tied else self.embedding_params)
        attention = (self.q_dim + self.v_dim) / 2 * self.layers * seq
        return 6.0 * params + (6.0 if causal and self.causal else 12.0) * attention
