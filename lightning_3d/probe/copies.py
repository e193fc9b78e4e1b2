"""WHICH parameters are copies of others?  An average of weights (EMA, BYOL, MoCo, mean teacher) kept as a module.

A hook of the user's combines the two after every step, parameter by parameter, so a rank needs the same of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

_IN_ORDER = (nn.ModuleList, nn.Sequential)
"""Their elements may be equal at first (layers of `nn.TransformerEncoder`) and are no copies that follow each other."""


def copies_in(module: nn.Module, trained: Set[str], class_of: Callable[[nn.Module], type] = type) -> dict[str, str]:
    """Name of a parameter that is not trained -> the one it is a copy of.

    A module is taken for a copy of a trained one of the same class and shapes if it has the same weights, or if both
    are attributes of one module (`self.model`, `self.teacher`), or if it is in torch's `AveragedModel`.

    Args:
        module: The whole module.
        trained: Names of the parameters that a step trains.
        class_of: The class of a module, before anything was done to it.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    modules = dict(module.named_modules(remove_duplicate=False))
    alike: dict[object, list[str]] = {}
    for name, m in modules.items():
        if name and any(names[id(p)] in trained for p in m.parameters()):
            alike.setdefault(_structure(m, class_of), []).append(name)
    found: dict[str, str] = {}
    for name, m in modules.items():
        parameters = list(m.parameters())
        if not name or not parameters or any(names[id(p)] in trained or names[id(p)] in found for p in parameters):
            continue
        originals = [other for other in alike.get(_structure(m, class_of), ()) if _may_follow(modules, name, other)]
        original = next((other for other in originals if _equal(m, modules[other])), None)
        if original is None and len(originals) == 1 and _named_beside(modules, name, originals[0]):
            original = originals[0]
        if original is not None:
            pairs = zip(parameters, modules[original].parameters(), strict=True)
            found |= {names[id(p)]: names[id(q)] for p, q in pairs if p is not q}
    return found


def _structure(module: nn.Module, class_of: Callable[[nn.Module], type]) -> object:
    shapes = tuple((name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters())
    return class_of(module), shapes


def _may_follow(modules: Mapping[str, nn.Module], name: str, other: str) -> bool:
    if (name + ".").startswith(other + ".") or (other + ".").startswith(name + "."):
        return False
    return not isinstance(modules[_common(name, other)], _IN_ORDER)


def _named_beside(modules: Mapping[str, nn.Module], name: str, other: str) -> bool:
    parent = name.rpartition(".")[0]
    return parent == other.rpartition(".")[0] or isinstance(modules[parent], AveragedModel)


def _common(name: str, other: str) -> str:
    def shared() -> Iterator[str]:
        for a, b in zip(name.split("."), other.split("."), strict=False):
            if a != b:
                return
            yield a

    return ".".join(shared())


def _equal(module: nn.Module, other: nn.Module) -> bool:
    """Equal values, that are not equal just because all of them are constants."""
    pairs = list(zip(module.parameters(), other.parameters(), strict=True))
    if any(type(x) is not nn.Parameter or x.is_meta for pair in pairs for x in pair):  # values come later
        return False
    different = any(p.numel() and bool((p != p.flatten()[0]).any()) for p, _ in pairs)
    return different and all(p.shape == q.shape and torch.equal(p, q) for p, q in pairs)
