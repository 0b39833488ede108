"""The one table: what a change of layout along one mesh axis does, forward and backward.

A boundary in the graph is one node `redistribute(x, group, size, src, dst)`. Per axis a value is

    I     invariant: equal on all ranks, and every rank does the same with it, so its gradient is equal too
    R     replicated: equal on all ranks, but used on different shards, so its gradient arrives partial
    P     partial: the true value is the sum over the ranks
    S(d)  sharded on dim d, in torch.chunk order

These are the types of `spmd_types`. I and R hold the same numbers; keeping them apart is what makes the backward of
every pair unambiguous. The nodes are composite operators: a graph that contains them can be run, differentiated and
traced as it is, and tracing turns them into `_c10d_functional` collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ndcompile.operators.weight_shards import cut, join, pad_to

INVARIANT, REPLICATED, PARTIAL = "I", "R", "P"

collectives = torch.ops._c10d_functional


def shard(dim: int) -> str:
    """The type of a value sharded on `dim`."""
    return f"S({dim})"


def shard_dim(kind: str) -> int:
    """The dim of `S(dim)`."""
    return int(kind[2:-1])


@dataclass(frozen=True)
class Step:
    """One redistribution as the primitives see it.

    `size` is the number of ranks of `group`; `full` the size of the sharded dim over all ranks, which the last shards
    need not fill (shards are padded to equal size); `coordinate` this rank's index, a 0-dim tensor, so that no rank's
    number is baked into the graph.
    """

    group: str
    size: int
    dim: int
    full: int
    coordinate: Tensor | None


def all_reduce(x: Tensor, step: Step) -> Tensor:
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", step.group))


def all_gather(x: Tensor, step: Step) -> Tensor:
    """Concatenate the ranks' equal shards on `dim`, without their padding. `sequence_products` knows what this lowers
    to."""
    gathered = _gather(x, step)
    if step.dim != 0:
        gathered = torch.cat(gathered.chunk(step.size, 0), step.dim)
    return gathered.narrow(step.dim, 0, step.full)


def reduce_scatter(x: Tensor, step: Step) -> Tensor:
    """Sum over the ranks and keep this rank's shard of `dim`, padded to equal size."""
    x = _pad(x, step)
    if step.dim != 0:
        x = torch.cat(x.chunk(step.size, step.dim), 0)
    return _scatter(x, step)


def _gather(x: Tensor, step: Step) -> Tensor:
    """The ranks' values, concatenated on the first dim."""
    return collectives.wait_tensor(collectives.all_gather_into_tensor(x.contiguous(), step.size, step.group))


def _scatter(x: Tensor, step: Step, op: str = "sum") -> Tensor:
    """This rank's part of the first dim of the ranks' sum."""
    return collectives.wait_tensor(collectives.reduce_scatter_tensor(x.contiguous(), op, step.size, step.group))


def narrow(x: Tensor, step: Step) -> Tensor:
    """This rank's shard of an invariant value, padded to equal size."""
    assert step.coordinate is not None
    x = _pad(x, step)
    shards = x.unflatten(step.dim, (step.size, x.shape[step.dim] // step.size))
    return shards.index_select(step.dim, step.coordinate.reshape(1)).squeeze(step.dim)


def identity(x: Tensor, step: Step) -> Tensor:
    return x.view_as(x)


Primitive = Callable[[Tensor, Step], Tensor]

REDISTRIBUTE: dict[tuple[str, str], tuple[Primitive, Primitive]] = {
    # (src, dst): (forward, backward)
    ("I", "R"): (identity, all_reduce),  # into colwise; a replicated parameter used on shards
    ("P", "I"): (all_reduce, identity),  # out of rowwise
    ("P", "R"): (all_reduce, all_reduce),  # a sum over ranks that each rank goes on with by itself
    ("S", "I"): (all_gather, narrow),  # colwise output gathered
    ("S", "R"): (all_gather, reduce_scatter),  # sequence shards into colwise
    ("P", "S"): (reduce_scatter, all_gather),  # rowwise onto sequence shards
    ("I", "S"): (narrow, all_gather),  # entering shards
}


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, step: Step, move: Primitive, back: Primitive) -> Tensor:
        ctx.step, ctx.back = step, back
        return move(x, step)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.back(grad, ctx.step), None, None, None


class _Unshard(torch.autograd.Function):
    """All-gather a parameter; its gradient is reduced in the parameter's own dtype, as a mean over the ranks.

    parts: sizes of the two axes, outer and inner, of the ranks. held: a gradient of the whole parameter that is reduced
    with it.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, step: Step, parts: tuple[int, int], dtype: torch.dtype, mean: str, held: Tensor | None
    ) -> Tensor:
        ctx.step, ctx.parts, ctx.dtype, ctx.mean = step, parts, x.dtype, mean
        ctx.save_for_backward(*([] if held is None else [held]))
        return join(_gather(x.to(dtype), step), step.dim, step.full, parts)

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad, step = grad.to(ctx.dtype), ctx.step
        for held in ctx.saved_tensors:
            grad = grad + held
        shards = cut(grad, step.dim, ctx.parts)
        reduced = _scatter(shards, step, "avg") if ctx.mean == "avg" else _scatter(shards, step) / step.size
        return reduced, None, None, None, None, None


class _AllToAll(torch.autograd.Function):
    """Exchange rows; backward is the exchange reversed."""

    @staticmethod
    def forward(ctx, x: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
        ctx.receive, ctx.send, ctx.group = receive, send, group
        return _exchange_rows(x, receive, send, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _exchange_rows(grad, ctx.send, ctx.receive, ctx.group), None, None, None


class _AverageGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: str, size: int, mean: str, held: Tensor | None) -> Tensor:
        ctx.group, ctx.size, ctx.mean = group, size, mean
        ctx.save_for_backward(*([] if held is None else [held]))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        for held in ctx.saved_tensors:
            grad = grad + held
        op = "avg" if ctx.mean == "avg" else "sum"
        grad = collectives.wait_tensor(collectives.all_reduce(grad.contiguous(), op, ctx.group))
        return grad if op == "avg" else grad / ctx.size, None, None, None, None


class _HoldGradient(torch.autograd.Function):
    """The gradient goes to `held`, in its dtype, and none to `x`."""

    @staticmethod
    def forward(ctx, x: Tensor, held: Tensor) -> Tensor:
        ctx.dtype = held.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, grad.to(ctx.dtype)


def _redistribute(
    x: Tensor, group: str, size: int, src: str, dst: str, full: int | None = None, coordinate: Tensor | None = None
) -> Tensor:
    sharded = src if src.startswith("S") else dst
    dim = shard_dim(sharded) % x.ndim if sharded.startswith("S") else 0
    if not sharded.startswith("S"):
        full = 0  # of no dim
    elif full is None:  # even shards
        full = x.shape[dim] * (size if src.startswith("S") else 1)
    move, back = REDISTRIBUTE[src[0], dst[0]]
    return _Redistribute.apply(x, Step(group, size, dim, full, coordinate), move, back)


def _unshard(
    x: Tensor,
    group: str,
    size: int,
    dim: int,
    full: int,
    dtype: torch.dtype,
    mean: str,
    parts: list[int] | None = None,
    held: Tensor | None = None,
) -> Tensor:
    outer, inner = parts or (1, size)
    return _Unshard.apply(x, Step(group, size, dim, full, None), (outer, inner), dtype, mean, held)


def _average_gradient(x: Tensor, group: str, size: int, mean: str, held: Tensor | None = None) -> Tensor:
    return _AverageGradient.apply(x, group, size, mean, held)


def _hold_gradient(x: Tensor, held: Tensor) -> Tensor:
    return _HoldGradient.apply(x.detach(), held)  # a gradient of zeros would be reduced as well


def _divide_gradient(x: Tensor, divisor: int) -> Tensor:
    return _DivideGradient.apply(x, divisor)


class _DivideGradient(torch.autograd.Function):
    """The sum over the ranks that send an expert their tokens becomes a mean."""

    @staticmethod
    def forward(ctx, x: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad / ctx.divisor, None


def _all_to_all(x: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    for rows in (*receive, *send):  # sizes that come from tensors: what the shapes of the graph rest on
        torch._check(rows >= 0)
    return _AllToAll.apply(x, receive, send, group)


def _exchange_rows(x: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    return collectives.wait_tensor(collectives.all_to_all_single(x.contiguous(), receive, send, group))


def _pad(x: Tensor, step: Step) -> Tensor:
    padding = -x.shape[step.dim] % step.size
    if isinstance(padding, int) and padding == 0:
        return x
    return pad_to(x, step.dim, x.shape[step.dim] + padding)


_library = torch.library.Library("ndcompile", "DEF")
_library.define(
    "redistribute(Tensor x, str group, int size, str src, str dst, SymInt? full=None, Tensor? coordinate=None)"
    " -> Tensor"
)
_library.define(
    "unshard(Tensor x, str group, int size, int dim, SymInt full, ScalarType dtype, str mean, int[]? parts=None,"
    " Tensor? held=None) -> Tensor"
)
_library.define("all_to_all(Tensor x, SymInt[] receive, SymInt[] send, str group) -> Tensor")
_library.define("divide_gradient(Tensor x, int divisor) -> Tensor")
_library.define("average_gradient(Tensor x, str group, int size, str mean, Tensor? held=None) -> Tensor")
_library.define("hold_gradient(Tensor x, Tensor held) -> Tensor")
_library.impl("redistribute", _redistribute, "CompositeImplicitAutograd")
_library.impl("unshard", _unshard, "CompositeImplicitAutograd")
_library.impl("average_gradient", _average_gradient, "CompositeImplicitAutograd")
_library.impl("hold_gradient", _hold_gradient, "CompositeImplicitAutograd")
_library.impl("all_to_all", _all_to_all, "CompositeImplicitAutograd")
_library.impl("divide_gradient", _divide_gradient, "CompositeImplicitAutograd")

redistribute = torch.ops.ndcompile.redistribute.default
unshard = torch.ops.ndcompile.unshard.default
average_gradient = torch.ops.ndcompile.average_gradient.default
hold_gradient = torch.ops.ndcompile.hold_gradient.default
all_to_all = torch.ops.ndcompile.all_to_all.default
divide_gradient = torch.ops.ndcompile.divide_gradient.default


def pair(node: fx.Node) -> tuple[str, str]:
    """(src, dst) of a redistribute node."""
    src, dst = node.args[3:5]
    return str(src), str(dst)
