"""Private symbols of torch that ndcompile uses: this file is the only place that imports them.

Tried on torch 2.13 (CPU, gloo) and torch 2.11 (CUDA, NCCL). A missing symbol fails at import, with its name.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.compiler
import torch.distributed as dist
from torch._C import DisableTorchFunctionSubclass as without_torch_function
from torch._dynamo import patch_dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext, TracingContext, tracing
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._higher_order_ops.wrap import TagActivationCheckpoint
from torch._inductor import comms, inductor_prims, ir
from torch._inductor import decomposition as inductor_decomposition
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.runtime import triton_heuristics
from torch._inductor.virtualized import V
from torch._logging import trace_structured
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses import FakeTensor, FakeTensorMode, fake_tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed._symmetric_memory import _pipelined_produce_and_all2all as produce_and_exchange
from torch.distributed._symmetric_memory import get_symm_mem_workspace
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
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv, guard_scalar
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

scans: Any = importlib.import_module("torch._higher_order_ops.associative_scan")
"""The package has a function of the module's name, which `import` would find."""

CAN_KEEP_RANK_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters
"""torch 2.11 always sorts the ranks of a new group; later releases can keep the order of the mesh."""

try:
    from torch.distributed.tensor.placement_types import _StridedShardOffsetMode

    NO_OFFSETS: object = _StridedShardOffsetMode.NONE
    """How torch asks a packed placement for a size alone."""
except ImportError:  # torch 2.11 always asks for an offset too
    NO_OFFSETS = object()


def abort_group(group: dist.ProcessGroup, device_type: str) -> None:
    """Abort what a group does with tensors of a device. Its own `abort` asks all backends, of which not all can."""
    group._get_backend(torch.device(device_type)).abort()


def mesh_without_groups(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh as rank 0 sees it, of which only names and shape can be asked: it has no process groups."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


def example_of(placeholder: torch.fx.Node) -> object:
    """The value that Dynamo lifted to this placeholder of its graph: the caller's or a module's own tensor, no fake."""
    return placeholder.meta["grapharg"].example if "grapharg" in placeholder.meta else None


def holds_float(placeholder: torch.fx.Node) -> bool:
    """Whether a placeholder of Dynamo's graph is a symbolic float, which Dynamo passes as a tensor."""
    value = placeholder.meta.get("example_value")
    return placeholder.op == "placeholder" and isinstance(getattr(value, "item_memo", None), torch.SymFloat)


def is_checkpoint(target: object) -> bool:
    """Whether a node of Dynamo's graph runs the body of a layer with gradient checkpointing."""
    return isinstance(target, TagActivationCheckpoint)


def compiled_frame() -> int | None:
    """Which Python frame Dynamo is compiling now: the same number for all sizes that one frame is compiled for."""
    current = CompileContext.current_compile_id()
    return None if current is None else current.frame_id


def dynamo_fake_mode() -> FakeTensorMode:
    """The fake mode of the trace whose graph a torch.compile backend is given."""
    context = TracingContext.try_get()
    assert context is not None
    assert context.fake_mode is not None
    return context.fake_mode


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


def backward_compiled_with_forward() -> AbstractContextManager[None]:
    """While active, AOTAutograd compiles the backward graph at once, so that its cache entry is whole before a step."""
    name = "force_non_lazy_backward_lowering"
    return functorch_config.patch({name: True}) if hasattr(functorch_config, name) else nullcontext()


def skipped_cuda_graphs() -> int:
    """How often inductor did not record a CUDA graph that it was to record; its log says why."""
    return counters["inductor"]["cudagraph_skips"]


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


force_stride_order: Any = inductor_prims.force_stride_order
"""(tensor, strides): inductor has the tensor computed in this order of memory, or copies it."""
fused_all_gather_matmul = torch.ops.symm_mem.fused_all_gather_matmul.default
fused_matmul_reduce_scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter.default


def open_symmetric_memory(group: str) -> None:
    """Let the GPUs of a group read each other's memory: each maps a workspace of the others; collective.

    Raises what torch raises where they cannot, such as ranks of two hosts. Neither torch 2.11 nor 2.13 needs the group
    to be enabled for it. The workspace grows with what is exchanged.
    """
    get_symm_mem_workspace(group, min_size=2**20)  # type: ignore[arg-type]


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
    "CAN_KEEP_RANK_ORDER",
    "NO_OFFSETS",
    "ConstantSource",
    "CustomGraphPass",
    "CustomPartitionerFn",
    "DimDynamic",
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "HintedShapes",
    "ModulesGiven",
    "ShapeEnv",
    "StridedShard",
    "TracingContext",
    "abort_group",
    "aot_autograd",
    "as_called_from_python",
    "autograd_function_of",
    "backward_compiled_with_forward",
    "checks_as_nodes",
    "compile_fx",
    "compile_fx_inner",
    "compiled_frame",
    "compiling",
    "data_as_detached",
    "decompositions",
    "default_group",
    "default_store",
    "disable_proxy_modes_tracing",
    "dynamo_fake_mode",
    "example_of",
    "fake_tensor",
    "force_stride_order",
    "functions_as_nodes",
    "fused_all_gather_matmul",
    "fused_matmul_reduce_scatter",
    "get_hash_for_files",
    "guard_scalar",
    "holds_float",
    "invoke_subgraph",
    "is_checkpoint",
    "launch_empty_grids",
    "make_boxed_func",
    "make_fx",
    "mesh_without_groups",
    "min_cut_rematerialization_partition",
    "open_symmetric_memory",
    "order_collectives_of_subgraphs",
    "outside_of_tracing",
    "own_decompositions",
    "patch_dynamo_config",
    "produce_and_exchange",
    "register_process_group",
    "resolve_process_group",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "scans_as_operators",
    "size_hint",
    "skipped_cuda_graphs",
    "tensor_updater",
    "trace_structured",
    "tracing",
    "two_dimensional_grid",
    "unregister_process_group",
    "without_torch_function",
]
