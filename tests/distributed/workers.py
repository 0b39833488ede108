"""What the tests run on ranks: meshes, compiled models, and the comparison with the single-process model."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import models
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

import ndcompile
from ndcompile.private.distributed import StridedShard

LIMIT = 1e-5
"""Largest error of a float32 tensor, by `error`."""
EXACT_LIMIT = 1e-10
"""The same in float64, for tensors that exceed LIMIT in float32."""

Layout = tuple[tuple[str, int], ...]

FSDP4: Layout = (("fsdp", 4),)
TP2: Layout = (("tp", 2),)
FSDP2_TP2: Layout = (("fsdp", 2), ("tp", 2))
REPLICATE2_FSDP2: Layout = (("dp_replicate", 2), ("fsdp", 2))
REPLICATE2_TP2: Layout = (("dp_replicate", 2), ("tp", 2))
TP2_FSDP2: Layout = (("tp", 2), ("fsdp", 2))

LAYOUTS = {
    "fsdp4": FSDP4,
    "tp2": TP2,
    "fsdp2_tp2": FSDP2_TP2,
    "replicate2_fsdp2": REPLICATE2_FSDP2,
    "replicate2_tp2": REPLICATE2_TP2,
}


def size(layout: Layout) -> int:
    """How many ranks a layout needs."""
    product = 1
    for _, ranks in layout:
        product *= ranks
    return product


@functools.cache
def mesh(layout: Layout, ranks: tuple[int, ...] | None = None) -> DeviceMesh:
    """The mesh of a layout, one a process; `ranks` permutes the ranks, in row-major order."""
    names, shape = tuple(name for name, _ in layout), tuple(length for _, length in layout)
    if ranks is None:
        return init_device_mesh("cpu", shape, mesh_dim_names=names)
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(shape), mesh_dim_names=names)


def compiled(
    name: str,
    layout: Layout,
    checkpoint: str | None,
    overrides: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    ranks: tuple[int, ...] | None = None,
    dynamo: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """The tiny model `name` compiled on `layout`.

    `options` go to `ndcompile.compile`. The backend is eager by default: lowering is most of the time of a tiny model.
    dynamo: by `ndcompile.prepare` and torch.compile with fullgraph=True.
    """
    options.setdefault("backend", "eager")
    model = models.on_meta(name, dtype, **(overrides or {}))
    if dynamo:
        lowering, dynamic = options.pop("backend"), options.pop("dynamic", None)
        model = ndcompile.prepare(model, mesh(layout, ranks), checkpoint=checkpoint, lowering=lowering, **options)
        model.compile(backend="ndcompile", fullgraph=True, dynamic=dynamic)
        return model
    return ndcompile.compile(model, mesh(layout, ranks), checkpoint=checkpoint, **options)


def full(tensor: Tensor) -> Tensor:
    """The whole tensor of a DTensor; collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    try:
        return tensor.full_tensor()
    except ValueError:  # torch 2.11, of a packed tensor, on every rank
        return _packed(tensor)


def _packed(tensor: DTensor) -> Tensor:
    """The whole tensor of shards that were cut by the mesh's dims in order, packed ones in parts."""
    whole = tensor.to_local()
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if isinstance(placement, Replicate):
            continue
        shards: list[Tensor] = [whole] * tensor.device_mesh.size(axis)
        dist.all_gather_object(shards, whole, group=tensor.device_mesh.get_group(axis))
        parts = placement.split_factor if isinstance(placement, StridedShard) else 1
        pieces = [shard.chunk(parts, placement.dim) for shard in shards]
        whole = torch.cat([piece[part] for part in range(parts) for piece in pieces], placement.dim)
    return whole


@dataclass
class Comparison:
    """Errors of one compiled model against the single-process model.

    loss: relative error. gradients, updated: error of each parameter's gradient, and of the parameter after a step.
    """

    loss: float
    gradients: dict[str, float]
    updated: dict[str, float] = field(default_factory=dict)

    def exceeding(self, limit: float = LIMIT) -> dict[str, float]:
        """What is over the limit: `loss` and FQNs."""
        errors = {"loss": self.loss, **self.gradients, **{f"{n} after the step": e for n, e in self.updated.items()}}
        return {name: value for name, value in errors.items() if not value <= limit}  # NaN exceeds


def error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """max|actual - expected| / max(max|expected|, floor)."""
    if actual.numel() == 0:
        return 0.0
    difference = (actual - expected).abs().max().item()
    scale = max(expected.abs().max().item(), floor)
    return difference / scale if scale else difference


def gradient_errors(model: torch.nn.Module, expected: dict[str, Tensor | None]) -> dict[str, float]:
    """Error of every gradient; collective. A gradient that only one side has counts as 1, unless it is zero; one that
    shares memory with another as infinite: what is done in place to one is done to both."""
    top = max(g.abs().max().item() for g in expected.values() if g is not None)
    errors = {}
    for name, parameter in model.named_parameters():
        reference = expected[name]
        if parameter.grad is None or reference is None:
            present = parameter.grad if reference is None else reference
            zero = present is None or not full(present).count_nonzero()
            errors[name] = 0.0 if zero else 1.0
        else:
            errors[name] = error(full(parameter.grad), reference, 1e-3 * top)
    return errors | dict.fromkeys(sharing_memory(model), math.inf)


def sharing_memory(model: torch.nn.Module) -> set[str]:
    """Names of parameters whose gradient shares memory with that of another one."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    local = {name: g.to_local() if isinstance(g, DTensor) else g for name, g in grads.items()}
    extents = sorted((g.data_ptr(), g.data_ptr() + g.nbytes, name) for name, g in local.items() if g.numel())
    return {name for (_, end, _), (begin, _, name) in pairwise(extents) if begin < end}
