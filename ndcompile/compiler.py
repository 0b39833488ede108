"""The public calls: compile a model, load weights into it, ask for its data rank."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from ndcompile.aliases import alias_parameters
from ndcompile.byte_sizes import parse_bytes
from ndcompile.call import bind
from ndcompile.checkpoint import SaveReport, save, save_method
from ndcompile.compiled_model import CompiledModel
from ndcompile.derive import with_derived_plan
from ndcompile.dynamo_backend import Prepared, traced_forward
from ndcompile.errors import MeshError, NdcompileError, UnsupportedError
from ndcompile.generation import generate
from ndcompile.loader import LoadReport
from ndcompile.lower import BACKENDS
from ndcompile.mesh import config_sizes, init_mesh, mesh_sizes, storage_mesh
from ndcompile.packed_repair import repaired_plan
from ndcompile.partition import Partitioner
from ndcompile.pipeline import check_disabled
from ndcompile.proof.check import check_mode
from ndcompile.refusals import check_has_checkpoints, check_model, check_optimizers, check_options
from ndcompile.slicing import agree_before_binding, move_buffers, real_weights, slice_weights

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
) -> Model:
    """Shard `model` over `mesh` and make its forward a compiled graph; returns the same model object.

    model: a transformers model, usually on the meta device. One with real weights is sliced in place. Or an ordinary
        nn.Module with real weights and a plan of the user's: `distributed_config=DistributedConfig(tp_plan={...})`.
    mesh: axes named out of dp_replicate, fsdp, ep, tp, in any order or subset; without names, 1-D, it means tp. None
        builds it from the config with `init_mesh`. ep holds the ranks that share experts and have different batches:
        with it there are ep x tp expert shards, and data is parallel over dp_replicate x fsdp x ep.
    distributed_config: plans to override (`tp_plan`, `ep_plan`, `fsdp_plan`), `ep_size` and `ep_implementation`,
        `fsdp_mixed_precision`. `tp_plan="derive"` finds a plan for a model that has none, see `derive_tp_plan`.
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

    The graph is captured at the first forward of each signature. Compile before building the optimizer: parameters are
    replaced by DTensors.

    Raises MeshError, PlanError, UnsupportedError or CheckpointError before any collective, on every rank.
    """
    compiled, weights = _shard(
        model,
        mesh,
        distributed_config,
        checkpoint,
        backend,
        dynamic,
        disable_passes,
        expert_capacity,
        loss_only,
        verify,
        cuda_graphs,
        memory_budget,
    )
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
    options = {
        "mesh": mesh,
        "distributed_config": distributed_config,
        "checkpoint": checkpoint,
        "lowering": lowering,
        "disable_passes": disable_passes,
        "expert_capacity": expert_capacity,
        "verify": verify,
        "memory_budget": memory_budget,
    }
    compiled, weights = _shard(
        model,
        mesh,
        distributed_config,
        checkpoint,
        lowering,
        None,
        disable_passes,
        expert_capacity,
        verify=verify,
        memory_budget=memory_budget,
    )
    compiled.bind(traced_forward(Prepared(compiled, options)))
    _fill(compiled, checkpoint, weights)
    return model


def load(
    model: nn.Module, source: str | os.PathLike[str], *, strict: bool = True, verify: str | None = None
) -> LoadReport:
    """Fill a compiled model from safetensors, each rank reading its own bytes. No collectives.

    source: a folder (one file, several with an index, or shards that torch.distributed.checkpoint wrote as
        safetensors), or a Hub id, which huggingface_hub's cache resolves.
    strict: see `ndcompile.loader.load_into`, which also says what is refused.
    verify: "hash" compares checksums of what all ranks hold with those of the files, which reads the checkpoint once
        more, a part on each rank. A difference raises CheckpointError on every rank and names the tensor and the ranks.

    Parameters keep their identity, so an optimizer may exist already. A rank that cannot load makes the others raise
    too, and one that dies does within 30 seconds.
    """
    if verify not in (None, "hash"):
        raise ValueError(f'verify={verify!r} is unknown. Use "hash", or None for no checksums.')
    return compiled_model(model).load(source, strict=strict, verify=verify)


def init_weights(model: nn.Module, seed: int) -> None:
    """Fill a compiled model with the initial values of its class, to train from scratch.

    They depend on `seed`, names and global indices alone: every mesh starts from the same weights. Each tensor is made
    whole on the CPU, one at a time, on every rank. Parameters keep their identity, so an optimizer may exist already.

    Raises AgreementError on every rank if the ranks pass different seeds.
    """
    compiled_model(model).init_weights(seed)


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    max_shard_size: int | str = "50GB",
    *,
    variant: str | None = None,
    save_original_format: bool = True,
) -> SaveReport:
    """Save a compiled model as a plain Hugging Face folder, each rank writing its own bytes. Call it on every rank.

    The files are those that transformers' `save_pretrained` writes of the uncompiled model, byte by byte, whatever the
    mesh: keys of the original checkpoint (`save_original_format=False` keeps the model's names), tied tensors once,
    files of at most `max_shard_size` (bytes, or such as "5GB"), config and generation config. Only the split of
    experts into files may differ: transformers keeps those of a layer together, over the size if need be.
    `model.save_pretrained` is the same call.

    The folder appears under its name when it is complete; what it held before, except for weights of the same
    `variant`, is kept. No collectives: the ranks wait for each other through the store. All ranks must see the folder.

    Raises on every rank, with the folder as it was: CheckpointError if files cannot be written, with the file and the
    size; AgreementError if another rank failed, or was silent for 30 seconds after it began; NdcompileError if nothing
    is loaded. A rank that never comes is waited for as in `set_agreement_timeout`.
    """
    check_has_checkpoints(model)
    return save(
        compiled_model(model),
        folder,
        max_shard_size=max_shard_size,
        variant=variant,
        original_format=save_original_format,
    )


def lower_only(model: nn.Module, batch: int, sequence: int) -> Partitioner:
    """Capture and lower a training step of `batch` sequences without running it; returns the partitioned graphs.

    Needs no weights and no other ranks, so it works under a fake process group for any number of ranks.
    """
    compiled = compiled_model(model)
    ids = torch.empty(batch, sequence, dtype=torch.int64, device=compiled.mesh.device)
    return compiled.lower_only(bind(compiled.__signature__, (), {"input_ids": ids, "labels": ids.clone()}))


def local_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Plain Parameters that share memory with this rank's shards of the trainable parameters, and with their gradients.

    For optimizers that fail on DTensors, such as SGD(fused=True): give it these instead of `model.parameters()`.
    Exact for optimizers that update every element by itself (SGD, Adam and their kin); one that looks at whole matrices
    (Muon, Adafactor) would see shards. Clear gradients through that optimizer, and clip those of `model.parameters()`:
    a norm of the aliases is that of one rank's shards. Ask again after `model.to(dtype)`. State of such an optimizer is
    this rank's own.
    """
    return alias_parameters(compiled_model(model).store)


def check_every_input(model: nn.Module, on: bool = True) -> None:
    """Compare the inputs of tp ranks at every call, not only at the first of a signature. For debugging a data loader:
    it hashes the inputs and asks the store each time."""
    compiled_model(model).checks_every_input = on


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Gradient accumulation without communication: calls within it keep their gradients on this rank.

        for number, batch in enumerate(micro_batches):
            with nullcontext() if number == len(micro_batches) - 1 else ndcompile.no_sync(model):
                loss = model(**batch).loss / len(micro_batches)
            loss.backward()
        optimizer.step()

    The next call outside of it adds them to its own gradients before the ranks reduce, so that a step reduces once. It
    is the forward that decides. What is held is a gradient of every whole (tp-local) weight, and `zero_grad` does not
    clear it: see `drop_held_gradients`. `model.no_sync()` is the same, which is what accelerate's `accumulate` calls.

    Raises UnsupportedError for a model that torch.compile runs; NdcompileError at `optimizer.step` while gradients are
    held; UnsupportedError in a backward that would add them twice or only in part.
    """
    compiled = compiled_model(model)
    if not isinstance(model.__dict__.get("forward"), CompiledModel):
        raise UnsupportedError("no_sync needs ndcompile.compile: torch.compile's graph always reduces its gradients.")
    return compiled.accumulation.no_sync()


def drop_held_gradients(model: nn.Module) -> None:
    """Forget the gradients that `no_sync` holds, when a step is abandoned between its micro-batches."""
    compiled_model(model).accumulation.drop()


def dropped_tokens(model: nn.Module) -> dict[str, int]:
    """How many (token, expert) pairs of this rank's batch each MoE layer dropped at the last forward, by layer.

    Empty unless the model was compiled with `expert_capacity`. Reading them waits for the device.
    """
    return {layer: int(count) for layer, count in compiled_model(model).dropped.items()}


def set_agreement_timeout(model: nn.Module, timeout: timedelta) -> None:
    """How long a rank of `model` waits for the others when weights are loaded and graphs are captured (30 minutes).

    After it the rank raises AgreementError, and closes its connections so that the others fail too. It must be longer
    than a compile.
    """
    compiled_model(model).agreement.timeout = timeout


def data_rank(model: nn.Module) -> int:
    """Which of the `data_world_size` different batches this rank takes. Ranks of a tp group share one."""
    return compiled_model(model).mesh.data_rank


def data_world_size(model: nn.Module) -> int:
    """How many ranks take different batches: dp_replicate x fsdp."""
    return compiled_model(model).mesh.data_world_size


def compiled_model(model: nn.Module) -> CompiledModel:
    """The CompiledModel behind a compiled or prepared model. Raises NdcompileError for another one.

    What torch.compile returns is asked for the model that it wraps.
    """
    forward: Any = getattr(model, "_orig_mod", model).__dict__.get("forward")
    forward = forward.prepared.compiled if hasattr(forward, "prepared") else forward
    if not isinstance(forward, CompiledModel):
        raise NdcompileError(f"{type(model).__name__} was not compiled with ndcompile.compile.")
    return forward


def _shard(
    model: PreTrainedModel,
    mesh: DeviceMesh | None,
    distributed_config: DistributedConfig | dict | None,
    checkpoint: str | os.PathLike[str] | None,
    backend: str,
    dynamic: bool | None,
    disable_passes: Collection[str],
    expert_capacity: float | None,
    loss_only: bool = False,
    verify: str = "error",
    cuda_graphs: bool = False,
    memory_budget: int | str | None = None,
) -> tuple[CompiledModel, dict[str, Tensor]]:
    """Check everything, plan, and agree with the other ranks; the model is as it was. Also returns its real weights."""
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown. Use one of {BACKENDS}.")
    if cuda_graphs and backend != "inductor":
        raise ValueError(f'cuda_graphs=True needs backend="inductor", which records them; it is {backend!r}.')
    budget = None if memory_budget is None else parse_bytes(memory_budget)
    if budget is not None and backend == "eager":
        raise ValueError('memory_budget needs backend "inductor" or "aot_eager": the eager graph recomputes nothing.')
    check_disabled(disable_passes)
    check_mode(verify)
    check_model(model)
    check_optimizers(model)
    config = _config(model, distributed_config)
    check_options(config)
    weights = {} if checkpoint is not None else real_weights(model)
    if not weights:
        check_has_checkpoints(model)
    mesh = _mesh(mesh, config)
    ep = config.ep_size or 1
    sizes = mesh_sizes(mesh, ep)
    config = with_derived_plan(model, config, sizes["tp"])
    plan = repaired_plan(model, sizes, config, expert_capacity=expert_capacity, verify=verify)
    compiled = CompiledModel(
        model,
        storage_mesh(mesh, ep),
        plan,
        backend=backend,
        dynamic=dynamic,
        disabled=frozenset(disable_passes),
        loss_only=loss_only,
        verify=verify,
        cuda_graphs=cuda_graphs,
        memory_budget=budget,
    )
    agree_before_binding(compiled.agreement, model, plan, weights, checkpoint is not None)
    return compiled, weights


def _fill(compiled: CompiledModel, checkpoint: str | os.PathLike[str] | None, weights: dict[str, Tensor]) -> None:
    """Give the parameters of a bound model their values, if there are any yet."""
    model = compiled.model
    if isinstance(model, PreTrainedModel):
        model.save_pretrained = save_method(partial(save_pretrained, model))
    if checkpoint is not None:
        compiled.load(checkpoint)
    elif weights:
        slice_weights(compiled.store, weights)
        move_buffers(model, compiled.mesh.device)


def _config(model: PreTrainedModel, given: DistributedConfig | dict | None) -> DistributedConfig:
    config = given if given is not None else getattr(getattr(model, "config", None), "distributed_config", None)
    if config is None:
        return DistributedConfig()
    return DistributedConfig.from_dict(config) if isinstance(config, dict) else config


def _mesh(mesh: DeviceMesh | None, config: DistributedConfig) -> DeviceMesh:
    """The user's mesh, checked against the config, or one built from the config."""
    if mesh is None:
        return init_mesh(config)
    if not dist.is_initialized():
        raise MeshError("The mesh's process group is gone: torch.distributed is not initialized.")
    asked = config_sizes(config)
    sizes = mesh_sizes(mesh, asked["ep"])
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
