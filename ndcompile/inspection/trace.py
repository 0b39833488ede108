"""A training step of rank 0 as graphs, for any mesh: no weights, no other ranks, no process group.

The files that compile a model are used as they are, from the plan to the partitioned graphs. Only the mesh is made by
hand: tracing asks the functional collectives for shapes, and these need the sizes of groups, not the groups.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from ndcompile.capture.call import bind
from ndcompile.capture.capture import Captured, capture
from ndcompile.capture.graph_input import PARAMETER
from ndcompile.capture.loss_only import drop_logits
from ndcompile.capture.opaque import OpaqueModules
from ndcompile.capture.shadow import Shadow, copy_without_weights
from ndcompile.capture.signature import checkpointed_layers, layers_of
from ndcompile.graphs.dump import dump
from ndcompile.graphs.pass_context import PassContext
from ndcompile.graphs.saved_activations import even_rows
from ndcompile.inspection.attention import fuse_attention
from ndcompile.inspection.in_place import sum_in_place
from ndcompile.inspection.layers import LayerStack, keep_traced, stack_of, traced_part
from ndcompile.inspection.mesh_without_ranks import mesh_of_sizes
from ndcompile.lowering.lower import lower
from ndcompile.mesh import StorageMesh
from ndcompile.operators.redistribute import redistribute
from ndcompile.passes.fit_memory_budget import fit_memory_budget
from ndcompile.pipeline import run_passes
from ndcompile.plans.packed_repair import repaired_plan
from ndcompile.plans.sharding_plan import ShardingPlan
from ndcompile.private.python import making_graphs
from ndcompile.proof.prove import Proof
from ndcompile.verify.sharded_dims import unsharded
from ndcompile.verify.verifier import GRADIENT_NODES

BUDGET = fit_memory_budget.__name__


@dataclass(frozen=True)
class NodeLine:
    """A node as it stood at some time. text: as `dump` prints it; operator: short name, "" for inputs and outputs."""

    name: str
    operator: str
    module: str
    text: str


@dataclass(frozen=True)
class PassView:
    """The graph as the pass `name` left it; "captured" is the graph before all passes."""

    name: str
    lines: tuple[NodeLine, ...]


@dataclass(frozen=True)
class Traced:
    """A training step (forward and backward) of rank 0.

    plan: of the whole model. mesh: without process groups. captured: the graph behind the passes. forward, backward:
    the lowered graphs that AOTAutograd's partition made of it; every `call_function` node has `meta["val"]` and, as
    `meta["custom"]["module"]`, the module that it belongs to. passes: the captured graph first, then as each pass left
    it. stack: which layers the graphs hold and how many each stands for.
    proof: what is known of the captured graph's values along tp; None without tp, and with experts over ep.
    opaque: what to tell of modules that run as one opaque node.
    rows: symbols of sizes that depend on routing -> what even routing would make them. frozen: parameters that are not
    trained. disabled: passes that were left out. loss_only: whether logits are left out of what is returned.
    """

    plan: ShardingPlan
    mesh: StorageMesh
    captured: Captured
    forward: fx.GraphModule
    backward: fx.GraphModule
    passes: tuple[PassView, ...]
    stack: LayerStack
    rows: Mapping[Any, int]
    frozen: frozenset[str]
    proof: Proof | None = None
    opaque: tuple[str, ...] = ()
    disabled: frozenset[str] = frozenset()
    loss_only: bool = False

    @cached_property
    def _known(self) -> dict[Any, int]:
        """Sizes that were computed already."""
        return {}

    @cached_property
    def groups(self) -> dict[str, str]:
        """Name of a process group, as collective nodes carry it -> name of its axis."""
        return {axis.group: name for name, axis in self.mesh.axes.items()}

    def times(self, node: fx.Node) -> int:
        """How many nodes of the whole model a node of a graph stands for: layers that are alike are traced once."""
        return self.stack.count(module_of(node))

    def size(self, value: Any) -> int:
        """A size as a number; sizes that depend on routing as even routing would make them."""
        if isinstance(value, int):
            return value
        expression = value.node.expr
        if expression not in self._known:
            number = expression.subs(self.rows)
            self._known[expression] = int(number if number.is_number else value.node.hint)
        return self._known[expression]

    def nbytes(self, value: Tensor) -> int:
        """Bytes of a (fake) tensor."""
        return math.prod(self.size(length) for length in value.shape) * value.dtype.itemsize


def module_of(node: fx.Node) -> str:
    """FQN of the module that a node belongs to; "" for the model itself and for inputs."""
    return (node.meta.get("custom") or {}).get("module", "")


@making_graphs
def trace(
    model: PreTrainedModel,
    sizes: Mapping[str, int],
    config: DistributedConfig,
    *,
    batch_size: int = 1,
    seq_len: int = 4096,
    expert_capacity: float | None = None,
    disabled: Collection[str] = (),
    whole: bool = False,
    proven: bool = True,
    memory_budget: int | None = None,
    loss_only: bool = False,
) -> Traced:
    """Trace a training step of `batch_size` sequences of `seq_len` tokens on a mesh of `sizes`.

    model: on meta or with weights; it is left as it is. sizes: dp_replicate, fsdp, tp and ep, the number of expert
    shards. whole: trace every layer, even where layers are alike; so does a `memory_budget`, which recomputes some of
    them. disabled: passes to leave out, of the graph and of its schedule. proven: capture without tp too, and prove the
    graph. loss_only: return no logits.

    Works with and without a running process group, and starts none. Raises PlanError and CaptureError as
    `ndcompile.compile` and the first call do.
    """
    copied = copy_without_weights(model).train()
    verify = "error" if proven else "off"
    plan = repaired_plan(model, sizes, config, expert_capacity=expert_capacity, verify=verify)
    stack = stack_of(copied, plan, whole or memory_budget is not None)
    keep_traced(copied, stack)
    part, mesh = traced_part(plan, stack), mesh_of_sizes(plan.sizes)
    views: list[PassView] = []
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        ids = torch.empty(batch_size, seq_len, dtype=torch.int64, device="meta")
        signature = inspect.signature(type(copied).forward.__get__(copied))
        call = bind(signature, (), {"input_ids": ids, "labels": ids.clone()})
        shadow = _shadow(copied, part, mesh, loss_only)
        captured = capture(shadow, copied, call, dynamic=False)
        dtypes = {entry.fqn: entry.dtype for entry in part.parameters}

        @cache
        def without_tp() -> fx.Graph:
            with_whole_weights = _shadow(copied, *unsharded(part, mesh), loss_only, shadow.opaque)
            return capture(with_whole_weights, copied, call, dynamic=False).module.graph

        whole_graph = without_tp if "tp" in mesh.axes and proven else None
        checkpointed = checkpointed_layers(copied)
        context = PassContext(part, mesh, dtypes, captured.fake_mode, checkpointed, whole_graph)
        context = replace(context, layers=layers_of(copied), memory_budget=memory_budget, offloads=plan.cpu_offload)
        context = replace(context, disabled=frozenset(disabled))
        groups = {axis.group: name for name, axis in mesh.axes.items()}
        later = set() if memory_budget is None else {BUDGET}  # it measures the graph that is lowered
        proof = run_passes(
            captured, context, later.union(disabled), lambda name, gm: views.append(_view(name, gm.graph, groups))
        )
        _mark_parameters(captured.module.graph)
        fuse_attention(captured.module.graph)
        if later.difference(disabled):
            fit_memory_budget(captured.module.graph, context)
        graphs = lower(captured, "aot_eager", alike=True, disabled=disabled)[1]
    assert graphs.forward is not None
    assert graphs.backward is not None, "no parameter requires a gradient"
    for graph in (graphs.forward.graph, graphs.backward.graph):
        sum_in_place(graph)
        _name_sums(graph)
    rows = MappingProxyType(even_rows(graphs.forward.graph))
    frozen = frozenset(name for name, p in model.named_parameters() if not p.requires_grad)
    opaque = tuple(shadow.opaque.notes())
    lowered = (graphs.forward, graphs.backward)
    known = (plan, mesh, captured, *lowered, tuple(views), stack, rows, frozen)
    return Traced(*known, proof, opaque, frozenset(disabled), loss_only)


def _shadow(
    model: PreTrainedModel,
    plan: ShardingPlan,
    mesh: StorageMesh,
    loss_only: bool,
    opaque: OpaqueModules | None = None,
) -> Shadow:
    shadow = Shadow(model, plan, mesh, opaque)
    if loss_only:
        drop_logits(shadow.module)
    return shadow


def _view(name: str, graph: fx.Graph, groups: Mapping[str, str]) -> PassView:
    lines = zip(graph.nodes, dump(graph, groups).splitlines(), strict=True)
    return PassView(name, tuple(NodeLine(n.name, operator_of(n), module_of(n), text) for n, text in lines))


def operator_of(node: fx.Node) -> str:
    """Short name of what a node calls; "" for inputs and outputs."""
    if node.op != "call_function":
        return ""
    target: Any = node.target
    return target._opname if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def _mark_parameters(graph: fx.Graph) -> None:
    """Say of boundaries of parameters that they are: what they lower to reduces gradients of parameters."""
    for node in graph.nodes:
        source = node.all_input_nodes[0] if node.target is redistribute else None
        while source is not None and source.op != "placeholder":
            source = source.all_input_nodes[0] if source.target in GRADIENT_NODES else None
        if source is not None and source.meta["input"].kind == PARAMETER:
            node.meta["custom"] = node.meta["custom"] | {"parameter": source.meta["input"].name}


def _name_sums(graph: fx.Graph) -> None:
    """Give what autograd makes outside of any module, as sums of gradients, the module of its last operand in one."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op == "call_function" and "module" not in (node.meta.get("custom") or {}):
            named = [source for source in node.all_input_nodes if source.op == "call_function" and module_of(source)]
            last = max(named, key=order.__getitem__, default=None)
            custom = {"module": module_of(last) if last is not None else ""}
            node.meta["custom"] = (node.meta.get("custom") or {}) | custom
