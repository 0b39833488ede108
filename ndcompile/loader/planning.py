"""What loading a model on a mesh would do, from headers and plain numbers: no process group, no weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from ndcompile.derive import with_derived_plan
from ndcompile.errors import MeshError
from ndcompile.loader.assignment import Assignment
from ndcompile.loader.catalog import Entry, read_catalog
from ndcompile.loader.layouts import MeshShape, storage_axes, targets_without_memory
from ndcompile.loader.load import match
from ndcompile.loader.proof import Proof, prove
from ndcompile.loader.rank_reads import ReadPlan, rank_reads
from ndcompile.loader.source import resolve_source
from ndcompile.loader.synthetic import synthetic_catalog
from ndcompile.mesh import check_expert_size
from ndcompile.plans.given_config import config_of
from ndcompile.plans.packed_repair import repaired_plan
from ndcompile.plans.sharding_plan import ShardingPlan


@dataclass(frozen=True)
class LoadingPlan:
    """The source of every tensor of a model, and the mesh whose ranks would hold it."""

    model: str
    mesh: MeshShape
    catalog: Mapping[str, Entry]
    assignment: Assignment

    def reads(self, ranks: Iterable[int] | None = None) -> ReadPlan:
        """Bytes that `ranks`, all by default, read from each file."""
        return ReadPlan(self.model, self.mesh, rank_reads(self.assignment, self.catalog, self.mesh, ranks))

    def proof(self) -> Proof:
        """Whether all ranks together hold every tensor, and use every byte, as often as they should."""
        return prove(self.assignment, self.catalog, self.mesh)


def read_plan(
    model: PreTrainedModel,
    source: str | os.PathLike[str],
    sizes: Mapping[str, int] | None = None,
    *,
    distributed_config: DistributedConfig | dict | None = None,
    ranks: Iterable[int] | None = None,
    strict: bool = True,
) -> ReadPlan:
    """How many bytes each rank reads from each file when `model` is loaded from `source`; print it for a table.

    model: compiled or not, on the meta device or with weights; it is left as it is.
    sizes: of the axes dp_replicate, fsdp, tp, and ep, the number of expert shards; absent ones are 1. Ranks are
        numbered as `init_mesh` does. None takes the sizes and the plan of a compiled model.
    ranks: which ranks, all by default.

    No process group is needed. Raises what `compile` and `load` raise: MeshError, PlanError, CheckpointError.
    """
    return plan_loading(model, source, sizes, distributed_config, strict).reads(ranks)


def plan_loading(
    model: PreTrainedModel,
    source: str | os.PathLike[str] | None,
    sizes: Mapping[str, int] | None = None,
    distributed_config: DistributedConfig | dict[str, Any] | None = None,
    strict: bool = True,
) -> LoadingPlan:
    """See `read_plan`. Without `source` it plans for the checkpoint that `model` would be saved to."""
    plan = model.__dict__.get("sharding_plan")
    if sizes is not None or not isinstance(plan, ShardingPlan):
        plan = _build(model, sizes or {}, distributed_config)
    mesh = storage_axes(plan.sizes)
    folder = None if source is None else resolve_source(source)
    catalog = synthetic_catalog(model) if folder is None else read_catalog(folder)
    targets = targets_without_memory(model, plan, mesh, mesh.coordinate(0))
    assignment, _ = match(model, targets, catalog, folder or "(not saved yet)", strict=strict)
    return LoadingPlan(plan.model, mesh, catalog, assignment)


def _build(
    model: PreTrainedModel, sizes: Mapping[str, int], given: DistributedConfig | dict[str, Any] | None
) -> ShardingPlan:
    config = config_of(given or {})
    full = {"dp_replicate": 1, "fsdp": 1, "tp": 1, "ep": 1, **sizes}
    if unknown := full.keys() - {"dp_replicate", "fsdp", "tp", "ep"}:
        raise MeshError(f"sizes has unknown axes {sorted(unknown)}. Use dp_replicate, fsdp, tp and ep.")
    check_expert_size(full, full["ep"])
    config = with_derived_plan(model, config, full["tp"])
    return repaired_plan(model, full, config)
