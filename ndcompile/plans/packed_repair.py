"""Repair of tp_plans that shard a fused projection as one: its parts are packed, each sharded by itself.

A plan of transformers may say 'colwise' of a weight that holds a gate and an up projection, which the code takes apart:
half of a rank's shard is then no shard of the gate. Where layouts are decided, such a plan is captured on a small batch
(layers that repeat are left out), and where the code takes a plain shard apart, the rule of that parameter becomes the
packed layout of as many parts. It is kept if the proof of the repaired graph passes, and the graph of the first call is
proven again. What is not proven stays as it is, and is refused at the first call.
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from ndcompile.capture.call import bind
from ndcompile.capture.capture import capture
from ndcompile.capture.shadow import Shadow, copy_without_weights
from ndcompile.derive.search import without_traces_of_refusals
from ndcompile.errors import NdcompileError
from ndcompile.graphs.pass_context import PassContext
from ndcompile.inspection.layers import keep_traced, stack_of
from ndcompile.inspection.mesh_without_ranks import mesh_of_sizes
from ndcompile.pipeline import run_passes
from ndcompile.plans.own_rules import matches
from ndcompile.plans.sharding_plan import Repair, ShardingPlan, build_plan, generic
from ndcompile.verify.fused_parameters import packed_values, parameters_before, parts_taken, rule_of
from ndcompile.verify.sharded_dims import SPLITS, pair_nodes, reads_of_shards, sharded_dims, unsharded

_logger = logging.getLogger("ndcompile.plan")

PACKED = {2: "packed_colwise", 3: "packed3_colwise"}
"""Number of parts -> the style that shards each by itself, in the place of GIVEN."""
GIVEN = "colwise"

BATCH, SEQUENCE = 2, 16
"""Of the call that is captured."""


def repaired_plan(
    model: nn.Module,
    sizes: Mapping[str, int],
    config: DistributedConfig,
    *,
    expert_capacity: float | None = None,
    verify: str = "error",
) -> ShardingPlan:
    """`build_plan` with the repairs that are proven, which `ShardingPlan.repairs` lists. The model is left as it is.

    A rule of the caller's own, in `config.tp_plan`, is never changed: repeat the model's rule there to keep it. Nor is
    anything with verify="off", for an ordinary nn.Module, or where experts exchange tokens, which has no proof.

    Raises PlanError, see `build_plan`.
    """
    plan = build_plan(copy_without_weights(model), sizes, config, expert_capacity=expert_capacity)
    if verify == "off" or plan.experts or not isinstance(model, PreTrainedModel) or not may_be_fused(plan):
        return plan
    try:
        with torch.inference_mode(False), torch.enable_grad(), without_traces_of_refusals():
            repairs = _Trial(model, config).repairs(plan)
            if not repairs:
                return plan
            rules = (config.tp_plan if isinstance(config.tp_plan, dict) else {}) | {r.rule: r.style for r in repairs}
            _Trial(model, replace(config, tp_plan=rules)).prove(sizes)
    except Exception as error:  # of the model on this call: the first call says what is wrong, on its own input
        _logger.debug("the tp_plan of %s is not repaired: %s", plan.model, error)
        return plan
    repaired = build_plan(copy_without_weights(model), sizes, replace(config, tp_plan=rules))
    if not dist.is_initialized() or dist.get_rank() == 0:
        for repair in repairs:
            _logger.warning("%s on tp=%d: %s", plan.model, sizes["tp"], repair)
    return replace(repaired, repairs=repairs)


def may_be_fused(plan: ShardingPlan) -> bool:
    """Whether a colwise weight is as wide as 2 or 3 of what a rowwise one beside it takes: only then is it traced."""
    taken: dict[str, set[int]] = defaultdict(set)
    placed = [(rule_of(p.fqn).rpartition(".")[0], p) for p in plan.parameters if isinstance(p.tp, Shard)]
    for parent, p in placed:
        if p.style.startswith("rowwise"):
            taken[parent].add(_width(p))
    return any(
        p.style == GIVEN and _width(p) in {parts * width for parts in PACKED for width in taken[parent]}
        for parent, p in placed
    )


def _width(entry: Any) -> int:
    return entry.shape[entry.tp.dim]


class _Trial:
    """The layers of a model that differ, and a call of them on fake tensors."""

    def __init__(self, model: PreTrainedModel, config: DistributedConfig) -> None:
        self.given, self.config = model, config
        signature = inspect.signature(type(model).forward.__get__(model))
        ids = torch.empty(BATCH, SEQUENCE, dtype=torch.int64, device="meta")
        labels = {"labels": ids.clone()} if "labels" in signature.parameters else {}
        self.call = bind(signature, (), {"input_ids": ids, **labels})

    def repairs(self, plan: ShardingPlan) -> tuple[Repair, ...]:
        """The rules whose parameters the code takes apart along the dim that the plan shards as one."""
        model, part, mesh = self._part(plan)
        shadow = Shadow(model, part, mesh)
        local = capture(shadow, model, self.call, dynamic=False).module.graph
        whole_shadow = Shadow(model, *unsharded(part, mesh), shadow.opaque)
        whole = capture(whole_shadow, model, self.call, dynamic=False).module.graph
        dims = sharded_dims(pair_nodes(local, whole)[0])
        packed = packed_values(local, part, dims)
        found: dict[str, Repair] = {}
        for node, _ in reads_of_shards(local, dims):
            source: Any = node.args[0]
            parts = parts_taken(node) if node.target in SPLITS and source not in packed else 0
            for fqn in parameters_before(source, dims) if parts in PACKED else ():
                rule = generic(rule_of(fqn))
                if part.by_name[fqn].style == GIVEN and not self._by_caller(rule):
                    module = (node.meta.get("custom") or {}).get("module", "")
                    why = f"{generic(module)!r} takes {parts} fused projections apart"
                    found.setdefault(rule, Repair(rule, GIVEN, PACKED[parts], why))
        return tuple(found.values())

    def prove(self, sizes: Mapping[str, int]) -> None:
        """Raises NdcompileError where the graph under the plan of `config` is not proven."""
        plan = build_plan(copy_without_weights(self.given), sizes, self.config)
        model, part, mesh = self._part(plan)
        shadow = Shadow(model, part, mesh)
        captured = capture(shadow, model, self.call, dynamic=False)
        dtypes = {entry.fqn: entry.dtype for entry in part.parameters}

        @cache
        def without_tp() -> fx.Graph:
            whole = Shadow(model, *unsharded(part, mesh), shadow.opaque)
            return capture(whole, model, self.call, dynamic=False).module.graph

        if run_passes(captured, PassContext(part, mesh, dtypes, captured.fake_mode, (), without_tp)) is None:
            raise NdcompileError("there is no proof")

    def _part(self, plan: ShardingPlan) -> tuple[Any, ShardingPlan, Any]:
        """The model without the layers that repeat, its plan along tp alone, and a mesh for it."""
        model: Any = copy_without_weights(self.given)
        keep_traced(model, stack_of(model, plan))
        sizes = {"dp_replicate": 1, "fsdp": 1, "tp": plan.sizes["tp"], "ep": 1}
        part = build_plan(copy_without_weights(model), sizes, self.config)
        return model, part, mesh_of_sizes(sizes)

    def _by_caller(self, rule: str) -> bool:
        given = self.config.tp_plan
        return isinstance(given, dict) and any(matches(key, rule.replace("*", "0")) for key in given)
