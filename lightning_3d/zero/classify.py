"""WHAT may an optimizer be given a part of?  Found out by an experiment, not by its name.

One toy step on two whole tensors is compared with steps on each tensor alone and on halves of the tensors.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.errors import ConfigurationError

Kind = Literal["elementwise", "rows", "whole", "coupled"]
"""elementwise: works on any range of a flattened parameter; rows: takes sparse gradients only (SparseAdam), and works
on rows or columns of a parameter; whole: needs whole parameters (Adafactor, Muon, LAMB); coupled: one parameter's
update depends on another's (LBFGS), so it cannot be sharded at all."""
_DEMANDS: tuple[Kind, ...] = ("elementwise", "rows", "whole", "coupled")


def classify(optimizer: Optimizer) -> Kind:
    """The kind of an optimizer, the most demanding one over its parameter groups.

    Args:
        optimizer: Any optimizer; it is not changed (copies with toy parameters take the steps).

    Raises:
        ConfigurationError: It cannot step on small tensors on the CPU.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return "coupled"
    kinds: set[Kind] = set()
    for group in optimizer.param_groups:
        # an optimizer may treat matrices and vectors differently, so one of each kind takes part
        examples = {p.ndim: p for p in group["params"] if p.ndim}
        kinds |= {_classify_example(optimizer, group, p) for p in examples.values()}
    return max(kinds, key=_DEMANDS.index, default="elementwise")


def takes_sparse_only(optimizer: Optimizer) -> bool:
    """Whether it refuses dense gradients and takes sparse ones."""
    try:
        return classify(optimizer) == "rows"
    except ConfigurationError:  # it cannot be tried
        return False


def check_fits(
    name: str,
    kind: Kind,
    replicas: int,
    parted: bool,
    divided: Sequence[str],
    masters: bool = False,
    offload: bool = False,
) -> None:
    """Refuse an optimizer that looks at more than a rank holds.

    Args:
        name: Its class.
        kind: Its kind.
        replicas: Data-parallel ranks its state is to be divided over; 1: it is not.
        parted: Ranks of a replica hold different parameters (tensor or pipeline parallelism).
        divided: Its parameters that are divided over tensor-parallel ranks.
        masters: It is to step on float32 copies of its parameters.
        offload: It is to step on the host.

    Raises:
        ConfigurationError: It cannot be used here.
    """
    if kind == "coupled" and parted:
        raise ConfigurationError(
            f"{name} updates one parameter by looking at others, of which a rank holds only some with tensor or "
            "pipeline parallelism. Use it with tensor_parallel_size=1, pipeline_parallel_size=1 and zero_stage=0, "
            "or choose another optimizer."
        )
    if kind == "coupled" and masters:
        raise ConfigurationError(
            f"{name} updates one parameter by looking at others (or re-evaluates the model), so it cannot step on "
            "float32 copies of bfloat16 or float16 parameters. Use master_weights=False and zero_stage=0, or another "
            "precision."
        )
    if kind == "coupled" and offload:
        raise ConfigurationError(
            f"{name} updates one parameter by looking at others (or re-evaluates the model), so it cannot step on "
            "copies of the parameters in the host's memory. Use offload_optimizer=False and zero_stage=0."
        )
    if kind == "coupled" and replicas > 1:
        raise ConfigurationError(
            f"{name} updates one parameter by looking at others (or re-evaluates the model), so its state cannot be "
            f"divided over {replicas} data-parallel ranks. Use zero_stage=0."
        )
    if kind == "whole" and divided and offload:
        raise ConfigurationError(
            f"{name} looks at whole matrices, and {len(divided)} of its parameters are divided over the "
            f"tensor-parallel ranks ({', '.join(divided[:3])}{', ...' if len(divided) > 3 else ''}), which put them "
            "together on the device for its steps, while offload_optimizer=True keeps what it steps on in the host's "
            "memory. Use offload_optimizer=False, tensor_parallel_size=1, or an optimizer that works element by "
            "element (SGD, Adam, AdamW)."
        )


def _classify_example(optimizer: Optimizer, group: dict[str, Any], example: Tensor) -> Kind:
    shape = tuple(min(4 if i else 6, n) for i, n in enumerate(example.shape))
    dtype = torch.float32 if group.get("fused") else torch.float64
    tolerance = 1e-6 if dtype is torch.float32 else 1e-12
    generator = torch.Generator().manual_seed(7)
    draw = lambda: torch.randn(shape, generator=generator, dtype=dtype)  # noqa: E731
    weights, gradients = [draw(), draw()], [[draw(), draw()] for _ in range(2)]
    # what it made with its parameters (anchors, sums): some of it in the toy's shape, to be split like a gradient
    made = optimizer.state.get(example, {})
    shapes = {tuple(getattr(example, name, example.shape)) for name in ("shape", "local_shape", "global_shape")}
    like = {k: _sample(v, weights[0]) for k, v in made.items() if isinstance(v, Tensor) and tuple(v.shape) in shapes}
    rest = {key: value for key, value in made.items() if key not in like}

    def run(split: Callable[[Sequence[Tensor]], list[list[Tensor]]]) -> list[Tensor]:
        state = {key: split([value, value]) for key, value in like.items()}
        return _toy_steps(optimizer, group, split(weights), [split(g) for g in gradients], state, rest)

    def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
        return all(torch.allclose(x, y, rtol=tolerance, atol=0) for x, y in zip(a, b, strict=True))

    try:
        together = run(lambda t: [list(t)])
    except Exception as error:
        if _works_on_rows(optimizer, group, weights, gradients):
            return "rows"
        raise ConfigurationError(
            f"{type(optimizer).__name__} cannot step on two small tensors on the CPU, without a closure: "
            f"{type(error).__name__}: {error}. That is tried since its parameters are to be divided, or copied; an "
            "optimizer that evaluates the model, or runs on a device only, cannot be. Use it with zero_stage=0, "
            "tensor_parallel_size=1, pipeline_parallel_size=1, master_weights=False and offload_optimizer=False, or "
            "choose another one."
        ) from error
    try:
        if not equal(together, run(lambda t: [[t[0]], [t[1]]])):
            return "coupled"
    except Exception:  # the experiment itself is the question: an optimizer that cannot run alone is coupled
        return "coupled"
    numel = weights[0].numel()
    if numel == 1:
        return "elementwise"
    cut = max(numel // 3, 1)
    try:
        halves = run(lambda t: [[x.flatten()[:cut] for x in t], [x.flatten()[cut:] for x in t]])
        joined = [torch.cat([halves[i], halves[i + 2]]).view(shape) for i in range(2)]
        return "elementwise" if equal(together, joined) else "whole"
    except Exception:  # an optimizer that refuses 1-D parts (Muon) needs the whole matrix
        return "whole"


def _works_on_rows(
    optimizer: Optimizer, group: dict[str, Any], weights: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> bool:
    """Whether it takes sparse gradients, and does the same to parts of a matrix alone."""
    if weights[0].ndim != 2 or min(weights[0].shape) < 2:
        return False

    # other rows in every step: what it does to those that a gradient leaves out counts, too
    left = [torch.arange(weights[0].shape[0]).unsqueeze(1) % 2 != step % 2 for step in range(len(gradients))]

    def run(split: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        lists = [[part] for w in weights for part in split(w)]
        steps = [[g.masked_fill(rows, 0) for g in gs] for gs, rows in zip(gradients, left, strict=True)]
        sparse = [[[part.to_sparse(1)] for g in gs for part in split(g)] for gs in steps]
        return _toy_steps(optimizer, group, lists, sparse, {}, {})

    try:
        together = run(lambda t: [t])
        rows, columns = run(lambda t: [t[:1], t[1:]]), run(lambda t: [t[:, :1], t[:, 1:]])
    except Exception:  # the experiment is the question
        return False
    parts = [(torch.cat(rows[i : i + 2]), torch.cat(columns[i : i + 2], 1)) for i in (0, 2)]
    return all(torch.allclose(w, part) for w, both in zip(together, parts, strict=True) for part in both)


def _sample(value: Tensor, weight: Tensor) -> Tensor:
    """Some of its numbers, as many as a weight has, in its shape."""
    if value.is_meta or not value.numel():
        return torch.zeros_like(weight)
    some = torch.arange(weight.numel(), device=value.device) % value.numel()
    return value.detach().reshape(-1)[some].to("cpu", weight.dtype).view(weight.shape)


def _toy_steps(
    optimizer: Optimizer,
    group: dict[str, Any],
    weights: list[list[Tensor]],
    gradients: list[list[list[Tensor]]],
    state: dict[str, list[list[Tensor]]],
    rest: dict[str, Any],
) -> list[Tensor]:
    """Two steps by one copy of the optimizer per list in `weights`; the resulting weights in order."""
    out: list[Tensor] = []
    for index, part in enumerate(weights):
        toy = copy.copy(optimizer)
        toy.state = collections.defaultdict(dict)
        toy._optimizer_step_pre_hooks = collections.OrderedDict()
        toy._optimizer_step_post_hooks = collections.OrderedDict()
        parameters = [nn.Parameter(w.clone()) for w in part]
        for i, parameter in enumerate(parameters if state or rest else ()):
            own = {key: values[index][i].clone() for key, values in state.items()}
            toy.state[parameter] = {**copy.deepcopy(rest), **own}
        rate = group.get("lr")
        toy.param_groups = [{**group, "params": parameters, "lr": rate if isinstance(rate, (int, float)) else 1e-2}]
        if toy.param_groups[0].get("lr") == 0:  # a warm-up that starts at zero would make every optimizer look alike
            toy.param_groups[0]["lr"] = 1e-2
        for step in gradients:
            for parameter, gradient in zip(parameters, step[index], strict=True):
                parameter.grad = gradient.clone()
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(0)
                type(optimizer).step(toy)  # the class's: a scheduler wraps the instance's
        out += [p.detach() for p in parameters]
    return out
