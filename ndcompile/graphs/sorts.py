"""Sorts in a graph."""

from __future__ import annotations

import torch
from torch import fx

SORTS = {torch.ops.aten.sort.default, torch.ops.aten.sort.stable}


def is_ascending(sort: fx.Node) -> bool:
    """Whether a node of SORTS sorts in ascending order."""
    assert isinstance(sort.target, torch._ops.OpOverload)
    named = {given.name: value for given, value in zip(sort.target._schema.arguments, sort.args, strict=False)}
    return not (named | sort.kwargs).get("descending", False)
