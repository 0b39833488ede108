"""Sizes that depend on routing: a plan takes the experts to be chosen evenly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default


def even_rows(graph: fx.Graph) -> dict[Any, int]:
    """Symbols of the numbers of rows that ranks exchange -> what they are when each expert is chosen equally often.

    Then a rank receives as many rows as it sends, and an equal part of them from every other.
    """
    rows: dict[Any, int] = {}
    for node in graph.find_nodes(op="call_function", target=EXCHANGE):
        sent, received = _rows(node.args[0]), _rows(node)
        if not isinstance(sent, int) or isinstance(received, int):
            continue
        rows[received.node.expr] = sent
        splits = [_value(split) for part in node.args[1:3] for split in part]
        for split in splits:
            for symbol in [] if isinstance(split, int) else split.node.expr.free_symbols:
                rows.setdefault(symbol, sent // max(len(node.args[1]), 1))
    return rows


def _rows(node: Any) -> Any:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value.shape[0]


def _value(split: Any) -> Any:
    return split.meta["val"] if isinstance(split, fx.Node) else split
