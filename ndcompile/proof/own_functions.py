"""A model's own autograd Function is one node of a graph, so that its backward is kept: what may be said of it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import fx

from ndcompile.private.tracing import autograd_function_of, make_fx
from ndcompile.proof.use import Use, shape, tensor_of

COPIES = ("detach", "alias", "clone", "_to_copy", "ones_like", "zeros_like", "view", "getitem")
"""Operators without a tag that leave every element in its place, where operands and result have one shape."""


def elementwise_function(use: Use) -> bool:
    """Whether a node applies an autograd Function that computes each element, forward and backward, by itself."""
    function = autograd_function_of(use.node.target)
    tensors = [tensor_of(source) for source in use.operands]
    if function is None or len({shape(o) for o in use.operands}) != 1 or shape(use.node) != shape(use.operands[0]):
        return False
    if any(source is not given for source, given in zip(use.operands, use.node.args, strict=False)):
        return False
    return computes_each_element(function, tuple(t.dtype for t in tensors if t is not None), len(use.node.args))


@cache
def computes_each_element(function: Any, dtypes: tuple[torch.dtype, ...], arguments: int) -> bool:
    """By its trace on tensors of a shape that no code can mistake for another."""
    if arguments != len(dtypes) or not all(dtype.is_floating_point for dtype in dtypes):
        return False

    def both_ways(*tensors: Any) -> Any:
        given = [tensor.detach().requires_grad_() for tensor in tensors]
        result = function.apply(*given)
        return result, torch.autograd.grad(result, given, torch.ones_like(result))

    try:
        with torch.enable_grad():
            graph = make_fx(both_ways)(*(torch.ones(3, 5, dtype=dtype) for dtype in dtypes)).graph
    except Exception:  # whatever the model's code raises: then nothing is known of it
        return False
    return all(_keeps_places(node) for node in graph.nodes if node.op == "call_function")


def _keeps_places(node: fx.Node) -> bool:
    target: Any = node.target
    value = tensor_of(node)
    if value is not None and value.shape not in ((3, 5), ()):
        return False
    return torch.Tag.pointwise in getattr(target, "tags", ()) or getattr(target, "__name__", "").startswith(COPIES)
