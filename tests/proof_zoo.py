"""Graphs of the zoo for the proof: one process, no ranks, no weights."""

from __future__ import annotations

import hashlib
import inspect
from functools import cache
from typing import Any

import torch
import zoo
from torch import fx
from transformers.distributed import DistributedConfig

from ndcompile.capture.call import bind
from ndcompile.capture.capture import Captured, capture
from ndcompile.capture.shadow import Shadow
from ndcompile.graphs.pass_context import PassContext
from ndcompile.inspection.mesh_without_ranks import mesh_of_sizes
from ndcompile.plans.packed_repair import repaired_plan
from ndcompile.verify.sharded_dims import unsharded


def held_out(model_type: str) -> bool:
    """Whether the rules were made without a look at this type: one half of all, by a hash of the name."""
    return hashlib.sha256(model_type.encode()).digest()[0] % 2 == 1


def with_tp_plan() -> list[str]:
    return [name for name in zoo.types() if zoo.on_meta(name).tp_plan]


def captured(
    model_type: str,
    tp: int,
    plan: dict[str, str] | None = None,
    sizes: dict[str, int] | None = None,
    call: dict[str, Any] | None = None,
    repair: bool = True,
    **changes: Any,
) -> tuple[Captured, PassContext]:
    """A training step's forward on a mesh of `tp` ranks, before all passes, and what the passes know.

    plan: overrides of the tp_plan. sizes: of other axes than tp. call: more arguments. repair: of fused projections.
    Raises PlanError and CaptureError as `ndcompile.compile` does.
    """
    model = zoo.on_meta(model_type, **changes)
    config = DistributedConfig(tp_plan=plan) if plan else DistributedConfig()
    sizes = {"dp_replicate": 1, "fsdp": 1, "ep": 1} | (sizes or {}) | {"tp": tp}
    layout = repaired_plan(model, sizes, config, verify="error" if repair else "off")
    mesh = mesh_of_sizes(layout.sizes)
    ids = torch.empty(2, zoo.SEQUENCE, dtype=torch.int64)
    arguments = {"input_ids": ids, "labels": ids.clone()} | (call or {})
    bound = bind(inspect.signature(type(model).forward.__get__(model)), (), arguments)
    shadow = Shadow(model, layout, mesh)
    own = capture(shadow, model, bound, dynamic=False)
    dtypes = {entry.fqn: entry.dtype for entry in layout.parameters}

    @cache
    def whole() -> fx.Graph:
        reference = Shadow(model, *unsharded(layout, mesh), shadow.opaque)
        return capture(reference, model, bound, dynamic=False).module.graph

    return own, PassContext(layout, mesh, dtypes, own.fake_mode, (), whole if tp > 1 else None)
