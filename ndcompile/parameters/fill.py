"""Values for the parameters and buffers of a bound model: from a checkpoint, or the initial ones of its class."""

from __future__ import annotations

import os
from functools import partial

import torch.distributed as dist

from ndcompile.loader import (
    LoadReport,
    Peers,
    Target,
    buffer_targets,
    initialize_missing,
    load_into,
    materialize_buffers,
)
from ndcompile.refusals import check_has_checkpoints
from ndcompile.runtime.compiled_model import CompiledModel
from ndcompile.together import together


def fill_from(
    compiled: CompiledModel, source: str | os.PathLike[str], *, strict: bool = True, verify: str | None = None
) -> LoadReport:
    """Read this rank's slices and the buffers; see `ndcompile.load`."""
    check_has_checkpoints(compiled.model)
    targets, agreement = _targets(compiled), compiled.agreement
    compiled.loads += 1
    agreement.exchange(f"{(name := f'load{compiled.loads}')}/begin", True)
    peers = None if verify is None else Peers.of(agreement, name)
    show = dist.get_rank() == 0
    read = partial(load_into, compiled.shadow.module, targets, source, strict=strict, verify=peers)
    with agreement.step(name):
        report = together(agreement, f"{name}/done", lambda stopped: read(progress=show, stopped=stopped))
    compiled.store.half_loaded = False
    return report


def initialize(compiled: CompiledModel, seed: int) -> None:
    """Give every tensor its initial value; see `ndcompile.init_weights`."""
    check_has_checkpoints(compiled.model)
    targets, agreement = _targets(compiled), compiled.agreement
    compiled.loads += 1
    with agreement.step(name := f"load{compiled.loads}"):
        agreement.same(f"{name}/seed", [f"seed {seed}"], "the seed of init_weights")
        initialize_missing(compiled.shadow.module, targets, seed)
    agreement.exchange(f"{name}/done", True)
    compiled.store.half_loaded = False


def _targets(compiled: CompiledModel) -> list[Target]:
    """This rank's part of every tensor that has to be filled, with memory; until then the model is half loaded."""
    store = compiled.store
    store.half_loaded = True
    store.materialize()
    materialize_buffers(compiled.model, compiled.mesh.device)
    targets = [
        Target(slot.entry.fqn, slot.local, slot.entry.shape, *store.layout(slot.entry), slot.entry.aliases)
        for slot in store.slots
    ]
    _, mesh_shape, coordinate = store.layout(store.slots[0].entry)
    return targets + buffer_targets(compiled.model, mesh_shape, coordinate)
