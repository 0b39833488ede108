"""The two calls that shard a model: `compile`, and `prepare` for torch.compile. What they return: model_calls.py."""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from ndcompile.checkpoint import save_method
from ndcompile.copy_engines.connect import check_copy_engines, connect
from ndcompile.derive import with_derived_plan
from ndcompile.errors import MeshError
from ndcompile.lowering.async_tp import check_async_tp
from ndcompile.mesh import config_sizes, init_mesh, mesh_sizes, storage_mesh
from ndcompile.model_calls import no_sync, save_pretrained
from ndcompile.options import Options, checked_options
from ndcompile.parameters.fill import fill_from
from ndcompile.parameters.slicing import agree_before_binding, move_buffers, real_weights, slice_weights
from ndcompile.plans.given_config import read_config
from ndcompile.plans.packed_repair import repaired_plan
from ndcompile.refusals import check_has_checkpoints, check_model, check_offload, check_optimizers
from ndcompile.runtime.compiled_model import CompiledModel
from ndcompile.runtime.dynamo_backend import Prepared, traced_forward
from ndcompile.runtime.generation import generate

Model = TypeVar("Model", bound=nn.Module)


def compile(
    model: Model,
    mesh: DeviceMesh | None = None,
    *,
    distributed_config: DistributedConfig | dict | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    backend: str = "inductor",
    dynamic: bool | None = None,
    disable_passes: Collection[str] = (),
    expert_capacity: float | None = None,
    loss_only: bool = False,
    verify: str = "error",
    cuda_graphs: bool = False,
    memory_budget: int | str | None = None,
    async_tp: bool = False,
    copy_engines: bool = False,
) -> Model:
    """Shard `model` over `mesh` and make its forward a compiled graph; returns the same model object.

    model: a transformers model, usually on the meta device. One with real weights is sliced in place. Or an ordinary
        nn.Module with real weights and a plan of the user's: `distributed_config=DistributedConfig(tp_plan={...})`.
    mesh: axes named out of dp_replicate, fsdp, ep, tp, in any order or subset; without names, 1-D, it means tp. None
        builds it from the config with `init_mesh`. ep holds the ranks that share experts and have different batches:
        with it there are ep x tp expert shards, and data is parallel over dp_replicate x fsdp x ep.
    distributed_config: plans to override (`tp_plan`, `ep_plan`, `fsdp_plan`), `ep_size` and `ep_implementation`,
        `fsdp_mixed_precision`. `fsdp_cpu_offload` keeps parameters, gradients and so optimizer states in host memory,
        see docs/speed.md. `tp_plan="derive"` finds a plan for a model that has none, see `derive_tp_plan`.
        Defaults to `model.config.distributed_config`. Sizes come from the mesh; a config that asks for others is an
        error.
    checkpoint: folder of safetensors, or a Hub id, see `load`; each rank reads the bytes of its own slices.
    backend: "inductor"; "aot_eager" to run the same graphs without inductor; "eager" to run the graph as the passes
        left it, for debugging: what backward gathers again or recomputes is kept.
    dynamic: None captures the first sizes as they are, and with symbolic batch and sequence when they change; True
        starts symbolic; False captures every size anew.
    disable_passes: names of optional passes to leave out, see `ndcompile.pipeline`.
    expert_capacity: exchange tokens in fixed shapes: a rank sends every other at most this multiple of an even share
        (tokens x top_k / ep) and drops the rest, see `dropped_tokens`; math.inf is the worst case, which drops nothing.
    loss_only: a call with labels returns the loss and no logits, which are then never whole: they are computed, and
        their gradient, for a part of the tokens at a time and on shards of the vocabulary. `.logits` of such an output
        raises UnsupportedError when it is used; a call without labels returns logits as ever.
    verify: "error" raises VerifyError at the first call for a graph that is not proven to compute what the model does
        without tp, see docs/proof.md; "warn" logs what is not proven; "off" leaves the proof out.
    cuda_graphs: record programs of inference whose shapes are fixed, such as a token behind a static cache, as CUDA
        graphs, which are replayed without Python launching kernels. The log `ndcompile.cuda_graphs` warns of a program
        that cannot be recorded, and says why. Needs the backend "inductor".
    memory_budget: bytes, or such as "20GB" or "20GiB": how much a rank may keep between forward and backward. Layers
        are recomputed in backward as far as that needs, the cheapest operators first, see passes/fit_memory_budget.py.
        What counts are the tensors that the forward graph saves for the backward graph, each memory once, logits and
        gathered weights that are kept among them; parameters, buffers and inputs do not count. With symbolic sizes it
        holds for the sizes that were captured. PlanError at the first call says the least that is possible.
    async_tp: with sequence parallelism on CUDA, gather the sequence and reduce onto its shards piece by piece, beside
        the matrix products, through symmetric memory between the GPUs of a tp group, see passes/pipeline_matmuls.py. A
        mesh or config that it does not fit, and a graph that has nothing of that kind, raise UnsupportedError.
    copy_engines: on CUDA, gather weights and reduce gradients by copies between the GPUs of an fsdp group, which take
        no multiprocessors from what runs beside them, instead of by NCCL, see copy_engines. Needs GPUs of one host that
        reach each other's memory, and 768 MiB of each for every group that gathers weights.

    The graph is captured at the first forward of each signature. Compile before building the optimizer: parameters are
    replaced by DTensors.

    Raises MeshError, PlanError, UnsupportedError or CheckpointError before any collective, on every rank.
    """
    options = checked_options(
        backend,
        dynamic=dynamic,
        disable_passes=disable_passes,
        expert_capacity=expert_capacity,
        loss_only=loss_only,
        verify=verify,
        cuda_graphs=cuda_graphs,
        memory_budget=memory_budget,
        async_tp=async_tp,
        copy_engines=copy_engines,
    )
    compiled, weights, _ = _shard(model, mesh, distributed_config, checkpoint, options)
    compiled.bind()
    model.no_sync = partial(no_sync, model)  # type: ignore[assignment]
    if isinstance(model, PreTrainedModel) and hasattr(model, "generate"):
        model.generate = partial(generate, compiled)
    _fill(compiled, checkpoint, weights)
    return model


def prepare(
    model: PreTrainedModel,
    mesh: DeviceMesh | None = None,
    *,
    distributed_config: DistributedConfig | dict | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    lowering: str = "inductor",
    disable_passes: Collection[str] = (),
    expert_capacity: float | None = None,
    verify: str = "error",
    memory_budget: int | str | None = None,
) -> PreTrainedModel:
    """Shard `model` for `torch.compile(model, backend="ndcompile")`; returns the same model object.

    Dynamo traces a model with the parameters that it has, so they are sharded before: build the optimizer after this
    call. The arguments are those of `compile`; `lowering` is its `backend`. torch.compile decides on `fullgraph` and
    `dynamic`, and its `options` may repeat the arguments of this call, which must agree.

    Called without torch.compile, or compiled by another backend, the model raises. Raises what `compile` raises.
    """
    given = {
        "distributed_config": distributed_config,
        "checkpoint": checkpoint,
        "lowering": lowering,
        "disable_passes": disable_passes,
        "expert_capacity": expert_capacity,
        "verify": verify,
        "memory_budget": memory_budget,
    }
    options = checked_options(
        lowering,
        disable_passes=disable_passes,
        expert_capacity=expert_capacity,
        verify=verify,
        memory_budget=memory_budget,
    )
    compiled, weights, mesh = _shard(model, mesh, distributed_config, checkpoint, options)
    compiled.bind(traced_forward(Prepared(compiled, given | {"mesh": mesh})))
    _fill(compiled, checkpoint, weights)
    return model


def _shard(
    model: PreTrainedModel,
    mesh: DeviceMesh | None,
    distributed_config: DistributedConfig | dict | None,
    checkpoint: str | os.PathLike[str] | None,
    options: Options,
) -> tuple[CompiledModel, dict[str, Tensor], DeviceMesh]:
    """Check everything, plan, and agree with the other ranks; the model is as it was. Also returns its real weights,
    and the mesh, which the config may have made."""
    check_model(model)
    check_optimizers(model)
    config, tp_is_guess = read_config(model, distributed_config)
    weights = {} if checkpoint is not None else real_weights(model)
    if not weights:
        check_has_checkpoints(model)
    mesh = _mesh(mesh, config, tp_is_guess)
    check_offload(config, mesh.device_type, options.cuda_graphs)
    ep = config.ep_size or 1
    sizes = mesh_sizes(mesh, ep)
    if options.async_tp:
        check_async_tp(mesh.device_type, sizes["tp"], bool(config.enable_sequence_parallel))
    if options.copy_engines:
        check_copy_engines(mesh.device_type, sizes["fsdp"])
    config = with_derived_plan(model, config, sizes["tp"])
    plan = repaired_plan(model, sizes, config, expert_capacity=options.expert_capacity, verify=options.verify)
    compiled = CompiledModel(model, storage_mesh(mesh, ep), plan, options)
    agree_before_binding(compiled.agreement, model, plan, weights, checkpoint is not None, options)
    if options.copy_engines:
        compiled.connection = connect(compiled.mesh, compiled.agreement, plan)
    return compiled, weights, mesh


def _fill(compiled: CompiledModel, checkpoint: str | os.PathLike[str] | None, weights: dict[str, Tensor]) -> None:
    """Give the parameters of a bound model their values, if there are any yet."""
    model = compiled.model
    if isinstance(model, PreTrainedModel):
        model.save_pretrained = save_method(partial(save_pretrained, model))
    if checkpoint is not None:
        fill_from(compiled, checkpoint)
    elif weights:
        slice_weights(compiled.store, weights)
        move_buffers(model, compiled.mesh.device)


def _mesh(mesh: DeviceMesh | None, config: DistributedConfig, tp_is_guess: bool) -> DeviceMesh:
    """The user's mesh, checked against the config, or one built from the config. tp_is_guess: see `read_config`."""
    if mesh is None:
        return init_mesh(config)
    if not dist.is_initialized():
        raise MeshError("The mesh's process group is gone: torch.distributed is not initialized.")
    asked = config_sizes(config)
    sizes = mesh_sizes(mesh, asked["ep"])
    if tp_is_guess:
        asked |= {name: sizes[name] for name in ("dp_replicate", "fsdp", "tp")}
    if any(size > 1 for size in asked.values()) and asked != sizes and asked | {"ep": sizes["ep"]} != sizes:
        raise MeshError(
            f"The mesh has {_spell(sizes)}, but distributed_config asks for {_spell(asked)}. Make them agree, or leave "
            "the sizes out of distributed_config: they come from the mesh."
        )
    if mesh.device_type != "cpu" and not torch.get_device_module(mesh.device_type).is_available():
        raise MeshError(f"The mesh is on {mesh.device_type}, which is not available here.")
    return mesh


def _spell(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
