"""WHAT may the block's code look at?  All of it, found before it is looked at; or a reason why it cannot be compared.

From the block: attributes of its modules, what they hold however deep, their classes. From every Python function that
runs in the call, at its entry: globals it names (also through modules, `os.environ`), closures, defaults, and all that
those hold. Objects whose state cannot be compared (iterators, large tables, the LightningModule) end the recording.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.probe.reach import (
    ATOMS,
    CONTAINERS,
    LIBRARIES,
    cells_of,
    contents_of,
    globals_of,
    held_attributes,
    hides_state,
    home,
    is_array,
    is_iterator,
    is_random,
    names_of,
    parts_of,
    slots_of_class,
)
from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.recorded.tape import Refused
from lightning_3d.tensor.registry import words

EXCHANGED = ("forward", "_compiled_call_impl")  # whoever runs the block may put others there for a while
_STANDARD = frozenset(nn.Module().__dict__) - {"training", "_parameters", "_buffers", "_modules"}
_BYTES = 4096
_MOST_OBJECTS = 20_000
_HEAP_TYPE = 1 << 9  # a class that can be changed
_OPAQUE_HOMES = frozenset(
    words(
        "typing abc _abc logging threading _thread torch lightning_3d re inspect importlib _frozen_importlib warnings"
    )
)
"""Of these packages objects have no state that a result could depend on (or it is in the signature of the call).

But attributes of torch's objects count (an optimizer has a learning rate), and `threading.local` is the user's.
"""
_OPAQUE: tuple[type, ...] = (
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, types.ClassMethodDescriptorType, types.ModuleType, types.FrameType),
    *(functools._lru_cache_wrapper, logging.Logger, torch.Generator, TensorGroup, Tensor),
)
_WRAPPERS = (types.MethodType, functools.partial, property, functools.cached_property, staticmethod, classmethod)
_CODE = (types.FunctionType, property, staticmethod, classmethod)
_DYNAMIC = frozenset(words("eval exec globals __import__ import_module _getframe currentframe"))
_BY_NAME = frozenset(words("getattr vars attrgetter __dict__ dir __getattribute__"))
_FLAG = re.compile(r"(get|is|are)_\w+|\w+_enabled|backends")
_ALLOWED_FLAGS = frozenset(
    words(
        """
        is_tensor is_floating_point is_complex is_storage is_grad_enabled is_autocast_enabled is_autocast_available
        is_inference is_inference_mode_enabled get_autocast_dtype get_autocast_gpu_dtype get_autocast_cpu_dtype
        is_autocast_cpu_enabled is_autocast_cache_enabled get_default_dtype are_deterministic_algorithms_enabled
        get_device is_nonzero is_same_size is_signed is_conj is_neg is_distributed get_device_module is_deterministic
        """
    )
)
"""Flags of torch that are compared with every call, or say something of a tensor."""


class Readable:
    """Places whose values the block's code may look at.

    Args:
        block: The block.
        forward: What runs in place of its class's forward, or None.

    Attributes:
        views: Live views of what counts as a whole: keys and values of dictionaries, lists, attributes of classes.
        sized: What has a length that counts.
        spaces, names: Single items: `space[name]`.
        owners, slots: Single attributes, of objects with `__slots__`.
        instances: Objects whose class counts.
        functions: Functions that were reached.
        references: Weak references.
        arrays: Small numpy arrays.
    """

    def __init__(self, block: nn.Module, forward: Any = None) -> None:
        self.views: list[Any] = []
        self.sized: list[Any] = []
        self.spaces: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.owners: list[Any] = []
        self.slots: list[str] = []
        self.instances: list[Any] = []
        self.functions: list[types.FunctionType] = []
        self.references: list[Any] = []
        self.arrays: list[Any] = []
        self._seen: dict[Any, Any] = {}
        self._todo: deque[Any] = deque()
        self._block = block
        self._add(block)
        self._add(forward)
        self._walk()

    # -- code that runs
    def enter(self, code: types.CodeType, space: dict[str, Any]) -> None:
        """A function is about to run for the first time.

        Raises:
            Refused: It can look at something that cannot be compared.
        """
        names = names_of(code)
        dynamic = _DYNAMIC.intersection(names)
        if dynamic:
            raise Refused(f"{code.co_name} uses {min(dynamic)}, so nobody knows what it reads")
        found = globals_of(code, space, through_libraries=True)
        values = [where[name] for where, name in found]
        modules = [v for v in values if isinstance(v, types.ModuleType)]
        if torch in modules or any(m.__name__.startswith("torch.") for m in modules):
            flags = [n for n in names if _FLAG.fullmatch(n) and n not in _ALLOWED_FLAGS and hasattr(torch, n)]
            if flags:
                raise Refused(f"{code.co_name} reads torch.{flags[0]}, which is not compared at every call")
        if _BY_NAME.intersection(names):  # attributes whose names the code does not show
            for module in modules:
                if module.__name__.partition(".")[0] not in LIBRARIES:
                    found += [(vars(module), name) for name in vars(module) if not name.startswith("__")]
        for where, name in found:
            if (id(where), name) not in self._seen:
                self._seen[id(where), name] = where
                self._item(where, name)
        self._walk()

    # -- walk
    def _walk(self) -> None:
        while self._todo:
            if len(self._seen) > _MOST_OBJECTS:
                raise Refused("its code can look at too many objects")
            self._look(self._todo.popleft())

    def _add(self, value: Any) -> None:
        if not isinstance(value, (*ATOMS, *_OPAQUE)) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._todo.append(value)

    def _add_all(self, values: Any) -> None:
        for value in values:
            self._add(value)

    def _item(self, space: dict[str, Any], name: str) -> None:
        self.spaces.append(space)
        self.names.append(name)
        self._add(space[name])

    def _mapping(self, value: Any) -> None:
        """Keys in their order and values, past whatever a subclass makes of looking them up."""
        kind: Any = next((k for k in (OrderedDict, dict) if isinstance(value, k)), type(value))
        keys, values = kind.keys(value), kind.values(value)
        self.sized.append(keys)
        if keys:  # of an empty one the length says all
            self.views += (keys, values)
        self._add_all(keys)
        self._add_all(values)

    def _look(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.BuiltinFunctionType):
            self._add(getattr(value, "__self__", None))
        elif isinstance(value, _WRAPPERS):
            self._add_all(parts_of(value))
        elif isinstance(value, weakref.ref):
            self.references.append(value)
            self._add(value())
        elif isinstance(value, CONTAINERS):
            self._container(value)
        elif is_array(value):
            if value.nbytes > _BYTES or value.dtype.hasobject:
                raise Refused(
                    "it holds, or its code names, a large numpy array, which cannot be compared at every call"
                )
            self.arrays.append(value)
        elif not is_random(value):  # what is drawn, `PythonCode` sees
            self._object(value)

    def _module(self, module: nn.Module) -> None:
        if hasattr(module, "_trainer") or home(type(module)) in ("lightning", "pytorch_lightning"):
            raise Refused("it can look at the LightningModule, which changes with every step")
        own = module.__dict__
        exchanged = EXCHANGED if module is self._block else ()
        for name in own:
            if name not in _STANDARD and name not in exchanged:
                self._item(own, name)
        if module is not self._block:
            self.sized.append(own)
        self.instances.append(module)
        self._add(type(module))

    def _class(self, kind: type) -> None:
        for one in kind.__mro__:
            mine = one.__flags__ & _HEAP_TYPE and (home(one) not in LIBRARIES or issubclass(one, nn.Module))
            if not mine or one is nn.Module or (id(one) in self._seen and one is not kind):
                continue
            self._seen[id(one)] = one
            self.views.append(vars(one).values())
            self._add_all(v for k, v in vars(one).items() if not k.startswith("__") or isinstance(v, _CODE))

    def _function(self, function: types.FunctionType) -> None:
        if home(function) in LIBRARIES and not function.__closure__:
            return
        self.functions.append(function)
        self._add_all(function.__defaults__ or ())
        self._add_all((function.__kwdefaults__ or {}).values())
        self._add_all(cells_of(function))
        if home(function) not in LIBRARIES and function.__dict__:
            self._mapping(function.__dict__)

    def _container(self, value: Any) -> None:
        if isinstance(value, (dict, types.MappingProxyType)):
            self._mapping(value)
        else:
            if not isinstance(value, (tuple, frozenset)):
                self.views.append(value)
                self.sized.append(value)
            self._add_all(contents_of(value))
        if type(value) not in CONTAINERS:
            self._attributes(value)

    def _object(self, value: Any) -> None:
        kind: Any = type(value)
        package = home(kind)
        if package in ("lightning", "pytorch_lightning"):
            raise Refused(f"it can look at a {kind.__name__} of Lightning, which changes with every step")
        compiled = kind.__name__ == "cython_function_or_method" or home(value) in LIBRARIES or package in LIBRARIES
        if callable(value) and compiled:  # a function of a library; draws are seen
            return
        of_users = kind is threading.local or (package == "torch" and not hides_state(kind))
        if package in _OPAQUE_HOMES and not of_users:
            return
        if is_iterator(value):
            raise Refused(
                f"it holds, or its code names, an iterator ({kind.__name__}), which gives something else every time"
            )
        if hides_state(kind):
            raise Refused(f"it holds, or its code names, a {package}.{kind.__name__}, whose state cannot be compared")
        self._attributes(value)

    def _attributes(self, value: Any) -> None:
        """Attributes of an object, and its class."""
        attributes = held_attributes(value)
        if attributes is not None:
            self._mapping(attributes)
        kind: Any = type(value)
        for name in slots_of_class(kind):
            self.owners.append(value)
            self.slots.append(name)
            self._add(getattr(value, name, None))
        self.instances.append(value)
        self._add(kind)

    def codes_inside(self, codes: Iterator[types.CodeType]) -> set[types.CodeType]:
        """All codes written inside of these."""
        found: set[types.CodeType] = set()
        todo = list(codes)
        while todo:
            inner = [c for c in todo.pop().co_consts if isinstance(c, types.CodeType)]
            todo += inner
            found.update(inner)
        return found
