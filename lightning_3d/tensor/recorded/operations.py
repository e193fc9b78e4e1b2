"""WHICH torch functions may be in a program?  What only reads shapes, what sets modes, what must not be recorded."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from lightning_3d.probe.intercept import original_apply
from lightning_3d.tensor.registry import words
from lightning_3d.tensor.resolve import reentered

SHAPES = frozenset(
    words(
        """
        size dim numel ndimension nelement stride storage_offset is_floating_point is_complex is_contiguous __len__
        element_size is_same_size get_device __hash__ is_signed is_neg is_conj is_inference has_names is_coalesced
        result_type promote_types is_tensor get_default_dtype can_cast broadcast_shapes is_storage
        _has_compatible_shallow_copy_type __repr__ __format__
        """
    )
)
"""Functions of shapes and types alone: the signature of a call fixes what they give."""

ATTRIBUTES = frozenset(
    words(
        """
        shape dtype device ndim layout names itemsize nbytes requires_grad is_leaf output_nr is_cuda is_cpu is_meta
        is_sparse is_sparse_csr is_mps is_quantized is_mkldnn is_xpu is_nested is_mtia is_vulkan is_xla is_ipu is_maia
        _version _base is_inference _is_view
        """
    )
)
"""Attributes of a tensor that the signature fixes."""

VIEWS = frozenset(words("T mT H mH real imag data"))
"""Attributes that are tensors themselves."""

MODES = frozenset(
    words(
        """
        _set_grad_enabled set_grad_enabled set_autocast_enabled set_autocast_dtype set_autocast_cache_enabled
        clear_autocast_cache autocast_increment_nesting autocast_decrement_nesting is_autocast_enabled
        get_autocast_dtype is_autocast_cache_enabled is_grad_enabled get_autocast_gpu_dtype get_autocast_cpu_dtype
        is_autocast_cpu_enabled is_autocast_available
        """
    )
)
"""They set or read the grad and autocast state, which is compared at every operation."""

EFFECTS = frozenset(
    words(
        """
        item tolist numpy __bool__ __int__ __float__ __index__ __complex__ __contains__ __array__ __dlpack__ equal
        allclose is_nonzero data_ptr storage untyped_storage register_hook register_post_accumulate_grad_hook backward
        retain_grad set_ detach_ requires_grad_ share_memory_ resize_ manual_seed seed set_rng_state get_rng_state
        initial_seed grad
        """
    )
)
"""Values that leave the tensors, and changes a program could not repeat."""

IN_PLACE_DUNDERS = frozenset(words("__iadd__ __isub__ __imul__ __itruediv__ __ipow__ __ifloordiv__ __imod__ __iand__"))


def is_in_place(name: str) -> bool:
    """`add_`, `__iadd__`, `__setitem__`."""
    dunder = name.startswith("__")
    return name == "__setitem__" or name in IN_PLACE_DUNDERS or (name.endswith("_") and not dunder)


@functools.cache
def opened(function: Any) -> Callable[..., Any] | None:
    """A Python function of `torch.nn.functional` whose operations are recorded one by one; None for anything else.

    The tests for overrides and most branches of these functions are done once, at the recording.
    """
    if isinstance(function, types.FunctionType) and function.__module__ == F.__name__:
        return reentered(function)
    return None


@functools.cache
def applied(function: type) -> Callable[..., Any]:
    """`function.apply` of an autograd Function, past all handlers: in a program all tensors are local."""
    bound = functools.partial(original_apply, function)
    bound.__name__ = function.__name__  # type: ignore[attr-defined]
    return bound


def is_higher_order(function: Any) -> bool:
    """It takes functions, whose operations could not be seen."""
    return isinstance(function, torch._ops.HigherOrderOperator) or "flex_attention" in getattr(function, "__name__", "")
