"""What `async_tp=True` asks of mesh, config and graph, and the opening of symmetric memory.

The pass is passes/pipeline_matmuls.py.
"""

from __future__ import annotations

import torch
from torch import fx

from ndcompile.errors import UnsupportedError
from ndcompile.operators.redistribute import pair
from ndcompile.private.distributed import open_symmetric_memory
from ndcompile.verify.type_inference import moves_over

aten = torch.ops.aten

MATRIX_PRODUCTS = frozenset({aten.addmm.default, aten.linear.default, aten.matmul.default, aten.mm.default})
WITHOUT = "or compile without async_tp."


def check_async_tp(device_type: str, tp: int, sequence_parallel: bool) -> None:
    """Raises UnsupportedError for a mesh or a config with which nothing could run beside matrix products.

    tp: size of the axis.
    """
    if device_type != "cuda":
        raise UnsupportedError(
            f"async_tp=True needs a mesh of CUDA devices, whose GPUs fetch from each other's memory; this one is on "
            f"{device_type!r}. Build the mesh with init_device_mesh('cuda', ...), {WITHOUT}"
        )
    if tp < 2:
        raise UnsupportedError(
            "async_tp=True needs a tp axis of at least 2 ranks; this mesh has none. Give the mesh an axis 'tp', "
            f"{WITHOUT}"
        )
    if not sequence_parallel:
        raise UnsupportedError(
            "async_tp=True needs sequence parallelism: its all-gathers and reduce-scatters are what runs beside matrix "
            f"products. Pass distributed_config=DistributedConfig(enable_sequence_parallel=True), {WITHOUT}"
        )


def check_has_products(graph: fx.Graph, group: str, model: str) -> int:
    """The number of sequence boundaries over `group` next to a matrix product in a captured graph.

    Raises UnsupportedError if there is none. What tells is the graph, so all ranks of a tp group raise.
    """
    found = sum(_is_next_to_product(node) for node in graph.nodes if moves_over(node, group))
    if not found:
        raise UnsupportedError(
            f"async_tp=True: in the graph of {model} no matrix product reads gathered tokens of the sequence, and none "
            "is reduced onto shards of it, so nothing would run beside one. Check enable_sequence_parallel and the "
            f"tp_plan (print(model.sharding_plan)), {WITHOUT}"
        )
    return found


def connect(group: str) -> None:
    """Open symmetric memory between the ranks of a group. Collective; raises UnsupportedError where they have none."""
    try:
        open_symmetric_memory(group)
    except RuntimeError as error:
        raise UnsupportedError(
            f"async_tp=True: the GPUs of a tp group cannot reach each other's memory: {error} Keep a tp group on GPUs "
            f"of one host that are linked, {WITHOUT}"
        ) from error


def _is_next_to_product(node: fx.Node) -> bool:
    source, target = pair(node)
    if (source, target) == ("S(1)", "R"):
        return any(user.target in MATRIX_PRODUCTS for user in node.users)
    return (source, target) == ("P", "S(1)") and node.all_input_nodes[0].target in MATRIX_PRODUCTS
