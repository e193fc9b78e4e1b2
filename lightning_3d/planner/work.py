"""WHAT does one rank do for one microbatch?  Operations, bytes and messages of each block of a model (no torch here).

The activation bytes are those of Korthikanti et al. 2022, eq. 1 to 6, extended by fused attention, grouped key/value
heads, gated MLPs, context parallelism and experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.planner.model import ModelShape

Matmul = tuple[int, int, int]
"""Rows, inner dimension and columns of a product."""


@dataclass(frozen=True)
class Setting:
    """What the work of a block depends on.

    Attributes:
        tokens: Tokens of one microbatch on one rank.
        seq: Length of the sequence that a token attends to (before it is divided over cp).
        samples: Samples of a microbatch.
        tp, cp, ep: Sizes of the axes.
        sp: Whether sequence parallelism is on.
        flash: Whether attention is fused.
        width: Bytes of an activation.
        fused_gate, keeps_gathered, logits, whole_logits: How activations are kept; see `constants.Software`.
        whole_embedding, whole_head: Whether every tensor-parallel rank holds all of it.
        narrow: Whether the inputs of linear layers are kept in 8 bits.
        keeps_products: Whether selective recomputation keeps the results of products and of attention, and computes
            the rest again; otherwise it computes attention's scores again.
    """

    tokens: int
    seq: int
    samples: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    flash: bool = True
    width: int = 2
    fused_gate: bool = True
    keeps_gathered: bool = False
    logits: float = 12.0
    whole_logits: bool = False
    whole_embedding: bool = False
    whole_head: bool = False
    narrow: bool = False
    keeps_products: bool = False


@dataclass(frozen=True)
class Params:
    """Parameters of a block on one rank.

    Attributes:
        dense: Those that all data-parallel ranks hold alike.
        experts: Those that only ranks of the same expert-parallel coordinate hold alike.
        frozen: Of the dense ones, those that are not trained: they have no gradient and no optimizer.
    """

    dense: float = 0.0
    experts: float = 0.0
    frozen: float = 0.0

    @property
    def total(self) -> float:
        return self.dense + self.experts

    @property
    def trained(self) -> float:
        return self.total - self.frozen


@dataclass(frozen=True)
class Work:
    """One microbatch through one block on one rank, forward.

    Attributes:
        matmuls: Its products, once each.
        attention: Operations of attention (a causal half if it is fused).
        scores: Elements of the score matrix that is written to memory.
        head_dim: Size of a head.
        moved: Bytes of elementwise operations.
        tp_payload, tp_calls: Bytes of one tensor-parallel all-reduce, and how many.
        cp_payload: Bytes of keys and values that pass around the cp ring.
        ep_payload, ep_calls: Bytes of one all-to-all of experts, and how many.
        kept: Bytes of activations kept for the backward.
        kept_selective: Bytes of them that selective recomputation keeps.
        kept_alternate: Bytes kept if every second product is computed again.
        passing: Bytes that live only while the block runs, at its peak (logits, gathered inputs).
        entry: Bytes of the input, which is all that full recomputation keeps.
        params: Its parameters on this rank.
    """

    matmuls: tuple[Matmul, ...] = ()
    attention: float = 0.0
    scores: float = 0.0
    head_dim: int = 128
    moved: float = 0.0
    tp_payload: float = 0.0
    tp_calls: int = 0
    cp_payload: float = 0.0
    ep_payload: float = 0.0
    ep_calls: int = 0
    kept: float = 0.0
    kept_selective: float = 0.0
    kept_alternate: float = 0.0
    passing: float = 0.0
    entry: float = 0.0
    params: Params = Params()

    @property
    def operations(self) -> float:
        """Operations of the products and of attention."""
        return self.operations_of_products + self.attention

    @property
    def operations_of_products(self) -> float:
        return sum(2.0 * rows * inner * columns for rows, inner, columns in self.matmuls)

    def operations_again(self, recompute: str, keeps_products: bool) -> float:
        """Operations that its backward computes again.

        Args:
            recompute: One of `RECOMPUTE`; "half" is the mean of the two kinds of layers.
            keeps_products: Selective recomputation computes elementwise operations again, not attention.
        """
        return {
            "none": 0.0,
            "half": self.operations / 2,
            "selective": self.attention if self.scores and not keeps_products else 0.0,
            "alternate": self.operations_of_products / 2,
            "full": self.operations,
        }[recompute]


def share(size: int, parts: int) -> int:
    """The largest of `parts` nearly equal parts."""
    return -(-size // parts)


def layer_work(model: ModelShape, layer: int, at: Setting) -> Work:
    """A transformer layer."""
    tokens, h, tp, width = at.tokens, model.hidden, at.tp, at.width
    heads = share(model.heads, tp)
    q, v = model.q_dim // model.heads * heads, model.v_dim // model.heads * heads
    kv = model.head_dim * share(model.kv_heads, tp)
    experts = model.moe(layer)
    matmuls = _attention_matmuls(model, at, q, kv, v)
    ffn = share(model.ffn if experts is None else experts.shared_ffn, tp)
    wide = 2 if model.gated else 1
    if ffn:
        matmuls += [(tokens, h, wide * ffn), (tokens, ffn, h)]
    routed = 0
    if experts is not None:
        local = max(1, experts.count // at.ep)
        rows = max(1, tokens * experts.active * at.ep // experts.count)  # of one expert, balanced
        inner = share(experts.ffn, tp)
        matmuls += [(tokens, h, experts.count)] + local * [(rows, h, wide * inner), (rows, inner, h)]
        routed = experts.active * inner
    attention = 2.0 * tokens * at.seq * (q + v) * (0.5 if at.flash and model.causal else 1.0)
    scores = 0.0 if at.flash else float(tokens) * at.seq * heads
    whole = tokens * h * width / (tp if at.sp else 1)
    inner_bytes = tokens * (ffn + routed) * width
    moved = (
        10 * whole + 2 * tokens * (q + kv) * width * (model.positions == 0) + (3 if model.gated else 2) * inner_bytes
    )
    kept, kept_selective = _kept(model, at, q, kv, v, heads, ffn, routed)
    results = tokens * (q + 2 * kv + v + wide * (ffn + routed)) * width + 2 * whole
    if at.keeps_products:
        kept_selective = min(kept, whole + results)
    params = _layer_params(model, layer, at)
    return Work(
        matmuls=tuple(matmuls),
        attention=attention,
        scores=scores,
        head_dim=model.head_dim,
        moved=moved,
        tp_payload=tokens * h * width if tp > 1 else 0.0,
        tp_calls=2 if tp > 1 else 0,
        cp_payload=2.0 * tokens * kv * width if at.cp > 1 else 0.0,
        ep_payload=tokens * h * width * experts.active if experts is not None and at.ep > 1 else 0.0,
        ep_calls=2 if experts is not None and at.ep > 1 else 0,
        kept=kept,
        kept_selective=kept_selective,
        kept_alternate=whole + tokens * v * width + (results - tokens * v * width) / 2,
        passing=2.0 * tokens * h * width + tokens * wide * ffn * width,
        entry=whole,
        params=params,
    )


def _attention_matmuls(model: ModelShape, at: Setting, q: int, kv: int, v: int) -> list[Matmul]:
    if model.latent is None:
        return [(at.tokens, model.hidden, q + 2 * kv), (at.tokens, v, model.hidden)]
    products: list[Matmul] = []
    for inner, columns in model.attention_matrices[:-1]:
        by_heads = columns >= model.q_dim or columns >= model.v_dim
        products.append((at.tokens, inner, share(columns, at.tp) if by_heads else columns))
    return [*products, (at.tokens, v, model.hidden)]


def _layer_params(model: ModelShape, layer: int, at: Setting) -> Params:
    cut = model.attention_params + model.dense_mlp_params(layer)
    kv = model.kv_heads < at.tp and model.latent is None  # key/value heads are repeated
    extra = 2 * model.hidden * model.head_dim * (at.tp - model.kv_heads) if kv else 0
    return Params(model.norm_params + (cut + extra) / at.tp, model.expert_params(layer) / (at.tp * at.ep))


def _kept(
    model: ModelShape, at: Setting, q: int, kv: int, v: int, heads: int, ffn: int, routed: int
) -> tuple[float, float]:
    """Activation bytes of a layer, with and without the scores of attention."""
    tokens, h, width = at.tokens, model.hidden, at.width
    norms = 2 * tokens * h * width
    linear = 1 if at.narrow else width
    inputs = 2 * tokens * h * linear
    masks = 2 * tokens * h if model.dropout else 0
    # with SP the linear layers' gathered inputs are gathered again in the backward, so only a part is kept
    cut = at.tp if at.sp else 1
    whole = (norms + masks) / cut + inputs / (1 if at.keeps_gathered else cut)
    attention = tokens * (q + 2 * kv + v) * width
    mlp = tokens * (ffn + routed) * (width * ((2 if at.fused_gate else 3) if model.gated else 1) + linear)
    if routed:
        mlp += tokens * h * width * 2  # what was sent to the experts and came back
    rest = whole + attention + mlp
    if at.flash:
        return (rest + 4.0 * tokens * heads,) * 2
    return rest + float(tokens) * at.seq * heads * (2 * width + 1 if model.dropout else width), rest


def embedding_work(model: ModelShape, at: Setting) -> Work:
    """The embedding: a look-up, and the masks of its dropout."""
    whole = at.tokens * model.hidden * at.width
    params = model.embedding_params / (1 if at.whole_embedding else at.tp) + model.positions * model.hidden
    kept = at.tokens * model.hidden / (at.tp if at.sp else 1) if model.dropout else 0.0
    return Work(
        moved=3.0 * whole,
        tp_payload=whole if at.tp > 1 else 0.0,
        tp_calls=1 if at.tp > 1 else 0,
        kept=kept,
        params=Params(params),
    )


def head_work(model: ModelShape, at: Setting) -> Work:
    """The last norm, the head and the loss. Logits are kept in the activations' and in full precision."""
    parts = 1 if at.whole_head else at.tp
    vocab = share(model.vocab, parts)
    logits = float(at.tokens) * vocab
    held = logits * (parts if at.whole_logits else 1)
    whole = at.tokens * model.hidden * at.width / (at.tp if at.sp else 1)
    norm = model.hidden * (2 if model.biases else 1)
    return Work(
        matmuls=((at.tokens, model.hidden, vocab),),
        moved=3 * whole + logits * (at.width + 4 * 4),
        kept=2 * whole + min(4.0, at.logits) * held,
        passing=max(0.0, at.logits - 4) * held + (4.0 * at.tokens * model.hidden if at.sp else 0.0),
        entry=whole,
        params=Params(norm + (0 if model.tied else model.embedding_params / parts)),
    )
