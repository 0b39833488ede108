"""Let copy engines gather weights and reduce gradients: the group of NCCL becomes one of the same ranks that copies.

Runs on the lowered forward and backward graphs, behind `overlap_communication`, for `copy_engines=True`.

Before:  w = wait(all_gather(p, 2, "fsdp"));  a, b = reduce_scatter_coalesced([g, h], "avg", 2, "fsdp")
After:   w = wait(all_gather_coalesced([p], 2, "fsdp.copies")[0]);  a, b = reduce_scatter_coalesced([g, h], "avg", 2,
         "fsdp.copies")

What is moved and when stays as it is. Products beside a collective of NCCL lose a third of its own time and more, as
they have fewer multiprocessors. Copies between GPUs need none, see ndcompile/copy_engines.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from ndcompile.graphs.collective_chains import REDUCE_SCATTER, TOGETHER, gradient_reductions, weight_gathers
from ndcompile.graphs.graph_edits import call

OPERATIONS = ("sum", "avg")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of gradients: sums are of float32."""


def use_copy_engines(graph: fx.Graph, copies: Mapping[str, str]) -> None:
    """Rename groups of collectives on weights and gradients. copies: name of a group -> of the one that copies."""
    for chain in [*weight_gathers(graph), *gradient_reductions(graph)]:
        if chain.start.args[-1] in copies and _can_be_copied(chain.start):
            _rename(graph, chain.start, copies)


def _can_be_copied(start: fx.Node) -> bool:
    if start.target in (REDUCE_SCATTER, TOGETHER[REDUCE_SCATTER]):
        return start.args[1] in OPERATIONS and all(each.meta["val"].dtype in DTYPES for each in start.all_input_nodes)
    return start.target in (*TOGETHER, *TOGETHER.values())


def _rename(graph: fx.Graph, start: fx.Node, copies: Mapping[str, str]) -> None:
    given, *settings, group = start.args
    settings = [*settings, copies[str(group)]]
    if start.target not in TOGETHER:
        start.args = (given, *settings)
        return
    with graph.inserting_before(start):
        several = call(graph, TOGETHER[start.target], ([given], *settings), start)
        result = call(graph, operator.getitem, (several, 0), start)
    start.replace_all_uses_with(result)
    graph.erase_node(start)
