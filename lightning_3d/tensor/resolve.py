"""HOW does a torch function find its rule?  By object, by name, by family; else a refusal that makes it gather."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from lightning_3d.tensor.placement import NoRule
from lightning_3d.tensor.registry import ANY_ARGUMENT, OWN_RULES, RULES, Args, Kwargs, Rule, words

ELEMENTWISE: frozenset[str] = frozenset(
    words(
        """
        add sub mul div truediv true_divide floordiv floor_divide rsub radd rmul rtruediv rdiv rpow rfloordiv pow
        neg abs exp exp2 log log1p log2 log10 expm1 sqrt rsqrt sin cos tanh tan sinh cosh asinh atanh atan sigmoid
        relu relu6 gelu silu mish elu selu celu leaky_relu hardswish hardsigmoid hardtanh softplus logsigmoid
        softsign tanhshrink square reciprocal erf erfc erfinv clamp clip clamp_min clamp_max where maximum minimum
        fmax fmin masked_fill addcmul addcdiv lerp eq ne lt le gt ge logical_and logical_or logical_not logical_xor
        and or xor not invert bitwise_and bitwise_or bitwise_not float half bfloat16 double to type_as clone detach
        contiguous isnan isinf isfinite nan_to_num sign round floor ceil trunc frac zeros_like ones_like empty_like
        full_like requires_grad_ remainder fmod positive atan2 threshold hardshrink softshrink alias copy fill zero
        cpu cuda int long bool logit sinc xlogy hypot conj real imag isclose heaviside copysign logaddexp nan_to_num
        subtract multiply divide negative absolute greater greater_equal less less_equal not_equal fix acos asin acosh
        arccos arcsin arctan arccosh arcsinh arctanh arctan2 logaddexp2 float_power sgn signbit angle deg2rad rad2deg
        lgamma digamma i0 conj_physical resolve_conj ldexp special_erf special_erfc special_expit special_logit
        special_log1p special_exp2 special_expm1 special_xlogy bitwise_left_shift bitwise_right_shift
        """
    )
)
"""Operations that act on each element alone (with broadcasting)."""

_METADATA = frozenset(
    words(
        """
        shape dtype device ndim is_cuda is_cpu is_meta layout is_sparse is_mps is_quantized is_mkldnn is_xpu
        is_nested itemsize is_mtia is_vulkan is_xla is_ipu is_maia names
        """
    )
)
_METADATA_CALLS = frozenset(
    words(
        """
        size dim numel ndimension is_floating_point is_complex __len__ element_size nelement is_same_size get_device
        __hash__ __format__ is_signed is_neg is_conj is_inference
        """
    )
)
_VALUE_READS = frozenset(words("__bool__ __int__ __float__ __long__ __index__ __complex__"))
_AUTOGRAD = frozenset(words("requires_grad grad_fn is_leaf output_nr retains_grad _version"))


def resolve(func: Any) -> Rule:
    """The handler for a function, found once and cached by the caller."""
    if func in OWN_RULES:
        return OWN_RULES[func]
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return _attribute(func, name)
    if name in _METADATA_CALLS:
        return _metadata
    handler = _by_name(name)
    if handler is not None:
        return handler
    if isinstance(func, types.FunctionType) and func.__module__ == F.__name__:
        return _reentered(func)
    return _no_rule(name)


def _by_name(name: str) -> Rule | None:
    candidates = [name]
    if name in _VALUE_READS:  # not the conversions `int`, `float`, `bool`
        return None
    if name.startswith("__") and name.endswith("__"):
        candidates.append(name.strip("_"))
    for candidate in candidates:
        if candidate in RULES:
            return _checked(candidate)
        if candidate in ELEMENTWISE:
            return RULES["<elementwise>"]
    inner = candidates[-1]
    in_place = inner[:-1] if inner.endswith("_") else inner[1:] if inner.startswith("i") and inner != name else ""
    return RULES["<elementwise in place>"] if in_place in ELEMENTWISE else None


def _checked(name: str) -> Rule:
    """Most rules are written for: the first argument is sharded."""
    rule = RULES[name]
    if name in ANY_ARGUMENT:
        return rule

    def checked(func: Any, args: Args, kwargs: Kwargs) -> Any:
        if not args and _is_cut(kwargs.get("input")):  # torch.sum(input=x)
            return rule(func, (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"})
        if not args or not _is_cut(args[0]):
            raise NoRule(f"{name}: the cut tensor is in an unexpected argument")
        return rule(func, args, kwargs)

    return checked


def _is_cut(x: Any) -> bool:
    return getattr(type(x), "shows_global_shape", False)


def _metadata(func: Any, args: Args, kwargs: Kwargs) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _attribute(func: Any, access: str) -> Rule:
    name: str = func.__self__.__name__
    if access != "__get__":
        return _no_rule(f"assignment to .{name}", fatal=True)
    if name in _METADATA:
        return _metadata
    if name in _AUTOGRAD:
        return lambda f, args, kwargs: getattr(args[0].local, name)
    if name in ("T", "mT", "H", "mH"):
        return _transposed(name)
    if name in ("data", "grad"):
        return _local_attribute(name)
    if name in ("real", "imag"):
        return RULES["<elementwise>"]
    return _no_rule(f".{name}")


def _transposed(name: str) -> Rule:
    def rule(func: Any, args: Args, kwargs: Kwargs) -> Any:
        x = args[0]
        if "H" in name and x.is_complex():
            raise NoRule(f".{name} of a complex tensor")
        if name in ("T", "H") and x.ndim != 2:
            return x.permute(*range(x.ndim - 1, -1, -1))
        return x.transpose(-2, -1)

    return rule


def _local_attribute(name: str) -> Rule:
    def rule(func: Any, args: Args, kwargs: Kwargs) -> Any:
        x = args[0]
        value = getattr(x.local, name)
        return None if value is None else type(x)(value, x.placement, x.group, x.sources)

    return rule


def _no_rule(name: str, fatal: bool = False) -> Rule:
    def refuse(func: Any, args: Args, kwargs: Kwargs) -> Any:
        raise NoRule(f"no rule for {name}", fatal=fatal)

    return refuse


def reentered(func: types.FunctionType) -> Callable[..., Any]:
    """`func` (Python code of torch.nn.functional) with its test for overrides switched off.

    So the operations inside it reach the rules: `multi_head_attention_forward`, `gumbel_softmax`, ... One that chooses
    between two others (`max_pool2d`, with indices or without) chooses between these, reentered: they would come back.
    """
    names = dict(func.__globals__)
    for test in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        names[test] = _never
    cells = tuple(map(_reentered_cell, func.__closure__ or ()))
    twin = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, cells)
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin


def _reentered_cell(cell: types.CellType) -> types.CellType:
    inner = cell.cell_contents
    own = isinstance(inner, types.FunctionType) and inner.__globals__.get("__name__") == F.__name__
    return types.CellType(reentered(inner)) if own else cell


def _never(*_: Any) -> bool:
    return False


def _reentered(func: types.FunctionType) -> Rule:
    twin = reentered(func)
    return lambda f, args, kwargs: twin(*args, **kwargs)
