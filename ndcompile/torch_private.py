"""Private symbols of torch that ndcompile uses: this file is the only place that imports them.

Tried on torch 2.13 (CPU, gloo) and torch 2.11 (CUDA, NCCL). A missing symbol fails at import, with its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.compiler
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.source import ConstantSource
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor import config_comms
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime import triton_heuristics
from torch._logging import trace_structured
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (
    _get_default_group as default_group,
)
from torch.distributed.distributed_c10d import (
    _get_default_store as default_store,
)
from torch.distributed.distributed_c10d import (
    _register_process_group as register_process_group,
)
from torch.distributed.distributed_c10d import (
    _resolve_process_group as resolve_process_group,
)
from torch.distributed.distributed_c10d import (
    _unregister_process_group as unregister_process_group,
)
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

CAN_KEEP_RANK_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters
"""torch 2.11 always sorts the ranks of a new group; later releases can keep the order of the mesh."""

try:
    from torch.distributed.tensor.placement_types import _StridedShardOffsetMode

    NO_OFFSETS: object = _StridedShardOffsetMode.NONE
    """How torch asks a packed placement for a size alone."""
except ImportError:  # torch 2.11 always asks for an offset too
    NO_OFFSETS = object()


def mesh_without_groups(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh as rank 0 sees it, of which only names and shape can be asked: it has no process groups."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


@contextmanager
def compiling() -> Iterator[None]:
    """While active, `torch.compiler.is_compiling()` is true: model code takes the branches that can be traced."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def backward_compiled_with_forward() -> AbstractContextManager[None]:
    """While active, AOTAutograd compiles the backward graph at once, so that its cache entry is whole before a step."""
    name = "force_non_lazy_backward_lowering"
    return functorch_config.patch({name: True}) if hasattr(functorch_config, name) else nullcontext()


def size_hint(size: int | torch.SymInt) -> int:
    """A size, or the number that stands for it while it is traced; no guard is added."""
    return size if isinstance(size, int) else int(size.node.hint)


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


__all__ = [
    "CAN_KEEP_RANK_ORDER",
    "NO_OFFSETS",
    "ConstantSource",
    "CustomPartitionerFn",
    "DimDynamic",
    "FakeTensorMode",
    "ShapeEnv",
    "StridedShard",
    "TracingContext",
    "aot_autograd",
    "backward_compiled_with_forward",
    "compile_fx",
    "compiling",
    "config_comms",
    "default_group",
    "default_store",
    "get_hash_for_files",
    "launch_empty_grids",
    "make_boxed_func",
    "make_fx",
    "mesh_without_groups",
    "min_cut_rematerialization_partition",
    "register_process_group",
    "resolve_process_group",
    "select_decomp_table",
    "size_hint",
    "trace_structured",
    "tracing",
    "two_dimensional_grid",
    "unregister_process_group",
]
