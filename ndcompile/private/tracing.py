"""Private symbols of torch's tracers: fake tensors, symbolic shapes, proxies, and what code sees while it is traced."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
import torch.compiler
from torch._C import DisableTorchFunctionSubclass as without_torch_function
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2 as auto_functionalized
from torch._subclasses import FakeTensor, FakeTensorMode, fake_tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, make_fx, track_tensor_tree
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    guard_scalar,
    statically_known_true,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

scans: Any = importlib.import_module("torch._higher_order_ops.associative_scan")
"""The package has a function of the module's name, which `import` would find."""


@contextmanager
def compiling() -> Iterator[None]:
    """While active, `torch.compiler.is_compiling()` is true: model code takes the branches that can be traced."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def scans_as_operators() -> Iterator[None]:
    """While active, `associative_scan` is its own decomposition, as many operators as the logarithm of the length.

    Model code imports it where it scans. As a higher-order operator it runs its body outside of the trace: the graph
    would hold what the tracer's fake tensors computed there.
    """
    original = scans.associative_scan
    scans.associative_scan = _scan
    try:
        yield
    finally:
        scans.associative_scan = original


def _scan(
    combine_fn: Callable[[Any, Any], Any], xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
) -> Any:
    """`torch.associative_scan`, whose arguments these are, of values with at least one element along `dim`."""
    leaves, spec = pytree.tree_flatten(xs)
    leaves = [leaf.flip([dim]) for leaf in leaves] if reverse else leaves

    def combine(*pair: torch.Tensor) -> Any:
        left, right = pair[: len(leaves)], pair[len(leaves) :]
        return combine_fn(pytree.tree_unflatten(left, spec), pytree.tree_unflatten(right, spec))

    scanned = scans.generic_associative_scan(combine, leaves, dim % leaves[0].ndim)
    return pytree.tree_unflatten([leaf.flip([dim]) for leaf in scanned] if reverse else scanned, spec)


class HintedShapes(ShapeEnv):
    """Sizes and numbers that depend on values are symbols that are taken to be `hint`: a run on fake tensors goes one
    of the ways that it may go, and what it returns still shows which sizes are such."""

    def __init__(self, hint: int) -> None:
        super().__init__()
        self.hint, self.created = hint, 0

    def create_unbacked_symint(self, source: Any = None) -> Any:
        self.created += 1
        source = ConstantSource(f"hinted{self.created}")
        symbol = self.create_symbol(
            self.hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None, do_not_specialize_zero_one=True
        )
        return self.create_symintnode(symbol, hint=self.hint, source=source)

    def create_unbacked_symfloat(self) -> Any:
        return float(self.hint)

    def create_unbacked_symbool(self) -> Any:
        return bool(self.hint)


@contextmanager
def outside_of_tracing() -> Iterator[None]:
    """While active, operators are neither traced nor computed on fake tensors, and code is told that it runs."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        with disable_proxy_modes_tracing(), unset_fake_temporarily(), torch._C.DisableTorchFunction(), tracing(None):
            yield
    finally:
        torch.compiler._is_compiling_flag = before


_INCLUDED, _EXCLUDED = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def as_called_from_python() -> AbstractContextManager[None]:
    """While active, operators are dispatched as outside of any other: autograd, which is switched off in the kernel of
    an operator, takes notice of them."""
    return torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED)


class ModulesGiven(NotImplementedError):
    """An autograd Function is given modules, see `functions_as_nodes`."""


@contextmanager
def checks_as_nodes(required: Callable[[], tuple[bool, str] | None]) -> Iterator[None]:
    """While active, a branch on data takes the way that `required` says, and a node of the trace checks the condition.

    required: what the condition must be, and the line that says so; None leaves the branch an error.
    """
    original = SymNode.guard_bool

    def guard_bool(self: Any, file: str, line: int) -> bool:
        try:
            return original(self, file, line)
        except GuardOnDataDependentSymNode:
            if (found := required()) is None:
                raise
            truth, place = found
            condition = torch.SymBool(self) if truth else torch.sym_not(torch.SymBool(self))
            torch.ops.aten._assert_scalar.default(condition, f"This check of the model does not hold: {place}")
            return truth

    SymNode.guard_bool = guard_bool  # type: ignore[method-assign]
    try:
        yield
    finally:
        SymNode.guard_bool = original  # type: ignore[method-assign]


class data_as_detached(TorchFunctionMode):
    """While active, `tensor.data` is `tensor.detach()`, which a trace sees; to set it is refused."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise NotImplementedError("a tensor gets another one's memory by an assignment to .data")
        return func(*args, **(kwargs or {}))


@contextmanager
def functions_as_nodes() -> Iterator[None]:
    """While active, a model's own autograd Function is one node of the trace, so that its backward is kept.

    Traced into, it would leave the operators of its forward alone, and their derivative is another gradient. Raises
    ModulesGiven for one that is given modules: its backward fills gradients of parameters that it has no input
    for (reversible layers).
    """
    kind: Any = torch.autograd.Function
    original = kind.__dict__["apply"]

    def apply(cls: Any, *args: Any) -> Any:
        mode: Any = get_proxy_mode()
        if mode is None or cls.__module__.partition(".")[0] in ("ndcompile", "torch"):
            return original.__func__(cls, *args)
        if modules := [type(leaf).__name__ for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.nn.Module)]:
            raise ModulesGiven(
                f"the autograd Function {cls.__name__} is given a {modules[0]}: gradients of parameters that its "
                "backward fills in by itself would pass the graph by"
            )
        given = pytree.tree_map(mode.tracer.unwrap_proxy, args)
        proxy = mode.tracer.create_proxy("call_function", _leaf(cls), given, {}, name=cls.__name__)
        with disable_proxy_modes_tracing():
            output = original.__func__(cls, *args)
        return track_tensor_tree(output, proxy, constant=None, tracer=mode.tracer)

    kind.apply = classmethod(apply)
    try:
        yield
    finally:
        kind.apply = original


@cache
def _leaf(function: Any) -> Callable[..., Any]:
    """A graph's target that applies an autograd Function, under its name; the same in every capture."""

    def leaf(*args: Any) -> Any:
        return function.apply(*args)

    leaf.__name__ = leaf.__qualname__ = function.__name__
    leaf.__module__ = function.__module__
    leaf.applies = function  # type: ignore[attr-defined]
    return leaf


def autograd_function_of(target: Any) -> Any:
    """The autograd Function that a node with this target applies, see `functions_as_nodes`; None for other targets."""
    return getattr(target, "applies", None)


def size_hint(size: int | torch.SymInt) -> int:
    """A size, or the number that stands for it while it is traced; no guard is added.

    A size that depends on values has none: large odd numbers stand for those, so that no two are taken for one.
    """
    if isinstance(size, int):
        return size
    if size.node.hint is not None:
        return int(size.node.hint)
    expression = size.node.expr
    numbers = {symbol: 100_003 + 2 * int(str(symbol).strip("zus")) for symbol in expression.free_symbols}
    return int(expression.subs(numbers))


def expect_sizes(env: ShapeEnv, expected: Mapping[Any, int]) -> None:
    """Tell inductor what symbols without a value will be about. It takes every expression of others for 8192."""
    env.var_to_hint_override |= {symbol: size for symbol, size in expected.items() if symbol.is_symbol}


__all__ = [
    "ConstantSource",
    "DimDynamic",
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "HintedShapes",
    "ModulesGiven",
    "ShapeEnv",
    "TracingContext",
    "as_called_from_python",
    "auto_functionalized",
    "autograd_function_of",
    "checks_as_nodes",
    "compiling",
    "data_as_detached",
    "disable_proxy_modes_tracing",
    "expect_sizes",
    "fake_tensor",
    "functions_as_nodes",
    "guard_scalar",
    "make_fx",
    "outside_of_tracing",
    "scans_as_operators",
    "size_hint",
    "statically_known_true",
    "tracing",
    "without_torch_function",
]
