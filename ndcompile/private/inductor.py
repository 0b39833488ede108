"""Private symbols of AOTAutograd and inductor: partition, decompositions, passes, and what is mended in them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._inductor import comms, inductor_prims, ir
from torch._inductor import decomposition as inductor_decomposition
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.runtime import triton_heuristics
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch._logging import trace_structured
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

from ndcompile.private.tracing import FakeTensorMode


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's table. What `cat` makes of one tensor and empty ones is contiguous, as it is without a compiler.

    Inductor's own decomposition (torch/_inductor/decomposition.py) returns a clone with the strides of that tensor, so
    that a `view` of it which runs without a compiler fails in the trace (a rotary embedding over whole heads).
    """
    table = dict(select_decomp_table())
    original = table[torch.ops.aten.cat.default]

    def cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
        joined = original(tensors, dim)
        return joined if joined is NotImplemented else joined.contiguous()

    return table | {torch.ops.aten.cat.default: cat}


@contextmanager
def own_decompositions() -> Iterator[None]:
    """While active, `decompositions()` is inductor's table.

    A table that is handed to `compile_fx` cannot become part of a cache key in torch 2.13: nothing would be cached, and
    every rank would compile for itself.
    """
    cat = torch.ops.aten.cat.default
    changed = decompositions()[cat]
    tables = (inductor_decomposition.decompositions, inductor_decomposition.fast_random_decomps())
    originals = [table[cat] for table in tables]
    for table in tables:
        table[cat] = changed
    try:
        yield
    finally:
        for table, original in zip(tables, originals, strict=True):
            table[cat] = original


def backward_compiled_with_forward() -> AbstractContextManager[None]:
    """While active, AOTAutograd compiles the backward graph at once, so that its cache entry is whole before a step."""
    name = "force_non_lazy_backward_lowering"
    return functorch_config.patch({name: True}) if hasattr(functorch_config, name) else nullcontext()


def skipped_cuda_graphs() -> int:
    """How often inductor did not record a CUDA graph that it was to record; its log says why."""
    return counters["inductor"]["cudagraph_skips"]


def two_dimensional_grid(columns: int, rows: int) -> tuple[int, int, int]:
    """How many blocks of one element inductor launches for a kernel over `columns` x `rows`."""
    grid = triton_heuristics.Grid2DWithYZOverflow({}, "python")
    grid.generate({"XBLOCK": 1, "YBLOCK": 1})
    return grid.eval_slow({"xnumel": columns, "ynumel": rows})


def launch_empty_grids() -> None:
    """Let inductor's kernels run over tensors without rows, which experts without tokens have.

    torch 2.11 divides by zero when it launches a two-dimensional kernel over no rows; torch 2.13 has this guard.
    """
    kind = triton_heuristics.Grid2DWithYZOverflow
    generate = kind.generate

    def guarded(grid: triton_heuristics.Grid2DWithYZOverflow, meta: dict[str, int]) -> None:
        generate(grid, meta)
        grid.y_grid = f"(0 if y_grid_div_ == 0 else {grid.y_grid})"

    try:
        two_dimensional_grid(columns=1, rows=0)
    except ZeroDivisionError:
        kind.generate = guarded  # type: ignore[method-assign, assignment]


def size_kernels_by_hints() -> None:
    """Let inductor choose blocks for as many rows as `private.tracing.expect_sizes` told it.

    torch 2.11 takes every kernel over a size without a value for one of 8192 elements, and launches blocks of 256: half
    a million for the rows of a MoE layer, twice the time. torch 2.13 asks for the hints itself.
    """
    original = TritonKernel.codegen_kernel
    if not hasattr(SizeVarAllocator, "symbolic_hint") or hasattr(original, "asks_for_hints"):
        return

    def codegen_kernel(kernel: Any, *args: Any, **kwargs: Any) -> str:
        sizes: Any = V.graph.sizevars
        sizes.symbolic_hint = partial(sizes.symbolic_hint, use_user_provided_hint_override=True)
        try:
            return original(kernel, *args, **kwargs)
        finally:
            del sizes.symbolic_hint  # what guards is decided by must not see them

    codegen_kernel.asks_for_hints = True  # type: ignore[attr-defined]
    TritonKernel.codegen_kernel = codegen_kernel  # type: ignore[method-assign, assignment]


force_stride_order: Any = inductor_prims.force_stride_order
"""(tensor, strides): inductor has the tensor computed in this order of memory, or copies it."""


@contextmanager
def tensor_updater(graph: torch.fx.Graph) -> Iterator[bool]:
    """While active in a pass of inductor, nodes change; then the fake values of new ones and all behind are made anew.

    Outside of inductor it does nothing, and says so: False.
    """
    if not isinstance(V.fake_mode, FakeTensorMode):
        yield False
        return
    before = set(graph.nodes)
    whole = "gm" in inspect.signature(FakeTensorUpdater).parameters  # torch 2.11 takes the graph
    updater = FakeTensorUpdater(graph.owning_module if whole else graph)  # type: ignore[arg-type]
    yield True
    for node in graph.nodes:
        if node not in before:  # a value that is there already would not be passed on to users
            node.meta.pop("val", None)
    updater.incremental_update()


def _communicates(operation: Any) -> bool:
    """Collectives, and the fused operators, which inductor does not take for such."""
    if isinstance(operation, ir.FallbackKernel):
        return str(operation.op_overload).startswith(("symm_mem.", "ndcompile.matmuls_reduce_scatter"))
    return isinstance(operation, ir._CollectiveKernel)


def order_collectives_of_subgraphs() -> None:
    """Let inductor keep the order of collectives where some of them are inside of subgraphs or of fused operators.

    It chains the collectives of a graph, each behind the one before, and would not see that a call of a subgraph runs
    some. Without it fusion could move a collective over such a call, on one rank and not on another.
    """
    original = comms.contains_collective
    if hasattr(original, "looks_into_subgraphs"):
        return

    def contains_collective(node: Any, *args: Any) -> bool:
        if original(node, *args):
            return True
        operation = getattr(node, "node", None)
        if isinstance(operation, ir.InvokeSubgraph):
            body: Any = operation.subgraph
            return body is not None and any(map(_communicates, body.graph.operations))
        return isinstance(operation, ir.FallbackKernel) and _communicates(operation)

    contains_collective.looks_into_subgraphs = True  # type: ignore[attr-defined]
    comms.contains_collective = contains_collective  # type: ignore[assignment]


__all__ = [
    "CustomGraphPass",
    "CustomPartitionerFn",
    "aot_autograd",
    "backward_compiled_with_forward",
    "compile_fx",
    "compile_fx_inner",
    "decompositions",
    "force_stride_order",
    "get_hash_for_files",
    "invoke_subgraph",
    "launch_empty_grids",
    "make_boxed_func",
    "min_cut_rematerialization_partition",
    "order_collectives_of_subgraphs",
    "own_decompositions",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "size_kernels_by_hints",
    "skipped_cuda_graphs",
    "tensor_updater",
    "trace_structured",
    "two_dimensional_grid",
]
