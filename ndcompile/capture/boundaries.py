"""Plan modules in capture: their forward is wrapped so that every tp boundary becomes a `redistribute` node.

The wrappers read a row of `styles.STYLES`. They are installed on a shadow copy, never on the user's model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ndcompile.errors import PlanError
from ndcompile.mesh import Axis
from ndcompile.operators.redistribute import redistribute
from ndcompile.plans.sharding_plan import ShardingPlan
from ndcompile.plans.styles import STYLES, SUM, Style

Forward = Callable[..., Any]


class Boundary:
    """An axis as the wrappers see it. `coordinate` is the graph input that holds this rank's index on it (0-dim)."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.coordinate: Tensor | None = None

    def move(self, x: Tensor, pair: tuple[str, str], full: int | None = None) -> Tensor:
        """One boundary; `full` is the global size of the sharded dim where shards may be uneven."""
        src, dst = pair
        narrows = "S" in src + dst and "I" in (src, dst)  # forward or backward takes this rank's part
        return redistribute(x, self.axis.group, self.axis.size, src, dst, full, self.coordinate if narrows else None)


def install_boundaries(shadow: nn.Module, plan: ShardingPlan, tp: Boundary) -> None:
    """Wrap the forward of every plan module of `shadow`, and give it a rank's counts.

    Raises PlanError for a style on a module that it cannot serve.
    """
    for entry in plan.modules:
        module, style = shadow.get_submodule(entry.fqn), STYLES[entry.style]
        if style.width is not None and not hasattr(module, style.width):
            raise PlanError(
                f"{entry.fqn!r} has the style {entry.style!r}, but {type(module).__name__} has no {style.width!r}."
            )
        wrap = LOCAL_FORWARDS[style.local] if style.local else boundary
        try:
            module.forward = wrap(shadow, module, style, tp)
        except AttributeError as error:
            raise PlanError(f"The style {entry.style!r} cannot serve {entry.fqn!r}: {error}") from error
    for name in plan.local_counts:
        owner, _, attribute = name.rpartition(".")
        module = shadow.get_submodule(owner)
        setattr(module, attribute, getattr(module, attribute) // tp.axis.size)


def boundary(shadow: nn.Module, module: nn.Module, style: Style, tp: Boundary) -> Forward:
    """The generic row: move the first input, use the parameters, move the output."""
    forward = module.forward
    full = getattr(module, style.width) if style.width else None

    @functools.wraps(forward)
    def local(*args: Any, **kwargs: Any) -> Any:
        if style.enter is not None:
            dim_size = args[0].shape[1] if style.enter[1] == "S(1)" else full
            args = (tp.move(args[0], style.enter, dim_size), *args[1:])
        with _moved_parameters(module, style, tp):
            output = forward(*args, **kwargs)
        if style.leave is not None:
            output = tp.move(output, style.leave, dim_size if style.leave[0] == "S(1)" else full)
        return output

    return local


def rowwise(shadow: nn.Module, module: nn.Module, style: Style, tp: Boundary) -> Forward:
    """The bias is added once, after the sum."""
    forward = module.forward
    full = getattr(module, style.width) if style.width else None

    @functools.wraps(forward)
    def local(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if style.enter is not None:
            x = tp.move(x, style.enter, full)
        bias = module._parameters.get("bias")
        if bias is not None:
            module._parameters["bias"] = None
        try:
            output = tp.move(forward(x, *args, **kwargs), SUM)
        finally:
            if bias is not None:
                module._parameters["bias"] = bias
        return output if bias is None else output + bias

    return local


def transposed(shadow: nn.Module, module: nn.Module, style: Style, tp: Boundary) -> Forward:
    """A Conv1D of transformers is a linear with another layout of its weight; its own forward views a global width."""
    linear = _conv1d(module)

    @functools.wraps(module.forward)
    def local(x: Tensor) -> Tensor:
        assert style.enter is not None
        return F.linear(tp.move(x, style.enter), linear.weight.t(), linear.bias)

    return local


def transposed_rowwise(shadow: nn.Module, module: nn.Module, style: Style, tp: Boundary) -> Forward:
    """The same for its rows: the bias is added once, after the sum."""
    linear = _conv1d(module)

    @functools.wraps(module.forward)
    def local(x: Tensor) -> Tensor:
        return tp.move(F.linear(x, linear.weight.t()), SUM) + linear.bias

    return local


def _conv1d(module: nn.Module) -> Any:
    if not isinstance(module, Conv1D):
        raise AttributeError(f"{type(module).__name__} is no Conv1D of transformers")
    return module


def vocabulary(shadow: nn.Module, module: nn.Module, style: Style, tp: Boundary) -> Forward:
    """Look up the ids of this rank's rows, zero for the others, and sum over the ranks."""
    forward = module.forward
    if not isinstance(module, nn.Embedding):
        raise AttributeError(f"{type(module).__name__} is no nn.Embedding")
    if module.max_norm is not None:
        raise AttributeError("max_norm rewrites rows of the weight in forward")
    padding_idx, module.padding_idx = module.padding_idx, None  # an index of the whole vocabulary, not of the shard

    @functools.wraps(forward)
    def local(ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert tp.coordinate is not None
        rows = module.weight.shape[0]
        row = ids - tp.coordinate * rows
        inside = (row >= 0) & (row < rows)
        output = forward(torch.where(inside, row, 0), *args, **kwargs)
        if padding_idx is not None:  # nn.Embedding gives the padding row no gradient
            output = torch.where((ids == padding_idx).unsqueeze(-1), output.detach(), output)
        return tp.move(torch.where(inside.unsqueeze(-1), output, 0.0), SUM)

    return local


def moe_experts(shadow: nn.Module, module: nn.Module, style: Style, tp: Boundary) -> Forward:
    """Every rank runs its slice of every expert: hidden states and routing weights enter, the outputs are summed."""
    forward = module.forward

    @functools.wraps(forward)
    def local(hidden: Tensor, *routing: Any, **kwargs: Any) -> Tensor:
        hidden = tp.move(hidden, ("I", "R"))
        if len(routing) >= 2:
            index, weights, *rest = routing
            routing = (index, tp.move(weights, ("I", "R")), *rest)
        return tp.move(forward(hidden, *routing, **kwargs), SUM)

    return local


def moe_identity(shadow: nn.Module, module: nn.Module, style: Style, tp: Boundary) -> Forward:
    """An identity expert gives the same on every rank, and the experts' sum counts it tp times."""
    forward = module.forward

    @functools.wraps(forward)
    def local(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(x / tp.axis.size, *args, **kwargs)

    return local


LOCAL_FORWARDS: dict[str, Callable[[Any, nn.Module, Style, Boundary], Forward]] = {
    "rowwise": rowwise,
    "transposed": transposed,
    "transposed_rowwise": transposed_rowwise,
    "vocabulary": vocabulary,
    "moe_experts": moe_experts,
    "moe_identity": moe_identity,
}


@contextmanager
def _moved_parameters(module: nn.Module, style: Style, tp: Boundary) -> Iterator[None]:
    if style.parameters is None:
        yield
        return
    originals = dict(module._parameters)
    module._parameters.update(
        {name: tp.move(p, style.parameters) for name, p in originals.items() if p is not None}  # type: ignore[misc]
    )
    try:
        yield
    finally:
        module._parameters.update(originals)
