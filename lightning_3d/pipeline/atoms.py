"""WHERE may the model be cut?  Atoms: modules that are run as one closed piece."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from lightning_3d.errors import PipelineError, near
from lightning_3d.pipeline import sharding
from lightning_3d.pipeline.events import Trace

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_OPEN_TORCH = (*_CONTAINERS, nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer)
_GRANULARITY = 2


def find_atoms(
    module: nn.Module, stages: int, closed: tuple[str, ...] = (), opened: Collection[str] = ()
) -> dict[str, nn.Module]:
    """Open the largest modules until the pieces are fine enough to be shared out over the stages.

    Stops at the elements of a long chain (ModuleList, Sequential) once they are at most 1.5/stages of the
    parameters, elsewhere at 1/(2*stages). Layers of `torch.nn` are never opened. The atoms cover all parameters that
    are in a child module; what the opened modules own themselves is used by glue code.

    Args:
        module: The root; it is always opened.
        stages: Number of pipeline stages.
        closed: Names of modules that must not be opened.
        opened: Names of modules that must be opened, see `used_by_methods`.

    Returns:
        Name -> module, each module once, in order of registration.
    """
    total = max(_parameter_count(module), 1)
    atoms: dict[int, tuple[str, nn.Module]] = {}
    seen: set[int] = set()

    def visit(name: str, current: nn.Module, in_chain: bool) -> None:
        count = _parameter_count(current)
        children = [(key, child) for key, child in current.named_children() if _parameter_count(child)]
        fine = count * _GRANULARITY * stages <= total or (in_chain and count * stages <= 1.5 * total)
        if current is not module:
            stop = name in closed or _is_leaf(current, children)
            fine = fine and name not in opened and id(current) not in seen
            if stop or (fine and not isinstance(current, (nn.ModuleList, nn.ModuleDict))):
                if count:
                    atoms.setdefault(id(current), (name, current))
                return
        if id(current) in seen:  # registered twice (self.encoder, self.online.encoder): opened under its first name
            return
        seen.add(id(current))
        chain = isinstance(current, _CONTAINERS) and len(children) >= max(2, stages // 2)
        for key, child in children:
            visit(f"{name}.{key}" if name else key, child, chain)

    visit("", module, False)
    return dict(atoms.values())


def check_split_names(names: list[str], module: nn.Module, parts: int, stages: int) -> None:
    """Raise unless `names` are modules, one for each part after the first.

    Args:
        names: First module of every part but the first.
        module: The root.
        parts: Into how many parts the model is cut: one per stage, more with virtual stages.
        stages: Number of pipeline stages.

    Raises:
        PipelineError: A wrong count, or a name that is no module.
    """
    if len(names) != parts - 1:
        what = f"{parts} stages" if parts == stages else f"{parts} parts on {stages} stages"
        raise PipelineError(
            f"pipeline_split names {len(names)} module{'s'[: len(names) != 1]} ({names}), but {what} have {parts - 1} "
            f"{'boundary' if parts == 2 else 'boundaries'}: name the first module of every "
            f"{'stage' if parts == stages else 'part'} but the first."
        )
    known = [name for name, _ in module.named_modules() if name]
    for name in names:
        if name not in known:
            raise PipelineError(f"pipeline_split names {name!r}, which is no module of the model." + near(name, known))


def used_by_methods(module: nn.Module, atoms: dict[str, nn.Module], trace: Trace) -> list[str]:
    """Atoms the step never calls as modules, though it uses their weights (`block.encode(x)`): their parts are pieces.

    A layer without parts whose weight is used directly is none of them.
    """
    called = set(trace.call_names())
    used = {name for event in trace.events for name in event.params}
    names = {id(p): name for name, p in module.named_parameters()}
    return [
        name
        for name, atom in atoms.items()
        if name not in called
        and not _is_leaf(atom, [(key, child) for key, child in atom.named_children() if _parameter_count(child)])
        and any(names[id(p)] in used for p in atom.parameters())
    ]


def atoms_for_split(
    module: nn.Module, stages: int, names: list[str], opened: Collection[str] = ()
) -> dict[str, nn.Module]:
    """Atoms such that every named module is one, or begins with one."""
    modules = dict(module.named_modules())
    atoms: dict[str, nn.Module] = {}
    for name, atom in find_atoms(module, stages, opened=opened).items():
        inside = [n for n in names if n.startswith(name + ".")]
        if not inside:
            atoms[name] = atom
            continue
        # a boundary lies inside this atom: open it along the path to the named module
        for key, child in atom.named_children():
            atoms.update(_open(f"{name}.{key}", child, inside))
    return {n: modules[n] for n in atoms}


def _open(name: str, module: nn.Module, inside: list[str]) -> dict[str, nn.Module]:
    if not _parameter_count(module):
        return {}
    deeper = [n for n in inside if n.startswith(name + ".")]
    if not deeper and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return {name: module}
    found: dict[str, nn.Module] = {}
    for key, child in module.named_children():
        found.update(_open(f"{name}.{key}", child, deeper))
    return found


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_leaf(module: nn.Module, children: list[tuple[str, nn.Module]]) -> bool:
    of_torch = sharding.original_class(module).__module__.startswith("torch.nn.")
    return not children or (of_torch and not isinstance(module, _OPEN_TORCH))
