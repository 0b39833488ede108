"""The public calls on a model that was compiled or prepared: fill it, save it, ask for its data rank."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from ndcompile.capture.call import bind
from ndcompile.checkpoint import SaveReport, save
from ndcompile.errors import NdcompileError, UnsupportedError
from ndcompile.loader import LoadReport
from ndcompile.lowering.partition import Partitioner
from ndcompile.parameters.aliases import alias_parameters
from ndcompile.parameters.fill import fill_from, initialize
from ndcompile.refusals import check_has_checkpoints
from ndcompile.runtime.compiled_model import CompiledModel


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
    return fill_from(compiled_model(model), source, strict=strict, verify=verify)


def init_weights(model: nn.Module, seed: int) -> None:
    """Fill a compiled model with the initial values of its class, to train from scratch.

    They depend on `seed`, names and global indices alone: every mesh starts from the same weights. Each tensor is made
    whole on the CPU, one at a time, on every rank. Parameters keep their identity, so an optimizer may exist already.

    Raises AgreementError on every rank if the ranks pass different seeds.
    """
    initialize(compiled_model(model), seed)


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
