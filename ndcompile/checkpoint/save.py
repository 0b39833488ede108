"""Save a compiled model as a plain Hugging Face folder: every rank writes its own bytes.

There is no collective, and no rank holds more than its shards and a few megabytes. Ranks go through the phases
together, by exchanges through the store: the first rank stages the files, all write, all compute what has to be
computed of whole tensors, the first puts the folder in place.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ndcompile.checkpoint.files import FilePlan, plan_files
from ndcompile.checkpoint.folder import Staging, check_folder, check_visible, publish, stage, write_config
from ndcompile.checkpoint.rank_writes import Destinations, find_destinations, rank_writes, sources_of
from ndcompile.checkpoint.reversal import compute_keys, saved_names, saved_tensors
from ndcompile.checkpoint.writing import execute, plan_write
from ndcompile.errors import AgreementError, NdcompileError
from ndcompile.loader.catalog import CheckpointError
from ndcompile.loader.progress import transfer_progress
from ndcompile.together import Work, patience, together
from ndcompile.verify.agreement import Agreement

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ndcompile.runtime.compiled_model import CompiledModel

_STOPPING = timedelta(seconds=15)
"""How long the other ranks need, after a fault, to end the call to the system that they are in."""

_logger = logging.getLogger("ndcompile.checkpoint")


@dataclass(frozen=True)
class SaveReport:
    """What a save did on this rank. `bytes_written` counts bytes of tensors, `seconds` wall time."""

    bytes_written: int
    seconds: float


@dataclass(frozen=True)
class _Job:
    """One save, planned: of global shapes, and thus alike on all ranks."""

    names: Mapping[str, Tensor]
    dtypes: Mapping[str, torch.dtype]
    destinations: Destinations
    files: FilePlan

    def lines(self, folder: Path) -> list[str]:
        """What the ranks compare."""
        places = [f"{key}: {file} from byte {offset}" for key, (file, offset) in self.files.place.items()]
        return [f"folder {folder}", *places, *(f"{name}: {dtype}" for name, dtype in self.dtypes.items())]

    @property
    def scratch_bytes(self) -> list[int]:
        return [self.names[name].shape.numel() * self.dtypes[name].itemsize for name in self.destinations.scratch]


def save(
    compiled: CompiledModel,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "50GB",
    variant: str | None = None,
    original_format: bool = True,
) -> SaveReport:
    """Write the model to `folder`; see `ndcompile.save_pretrained`."""
    start, agreement, state = time.perf_counter(), compiled.agreement, _State(Path(os.path.realpath(folder)))
    compiled.saves += 1
    name = f"save{compiled.saves}"
    try:
        with agreement.step(name):
            check_folder(state.folder)
            job = _plan(compiled, max_shard_size, variant, original_format)
            written = _run_phases(compiled, name, job, state, variant)
    except Exception as error:
        if _is_to_remove(agreement, name) and state.staging is not None:
            state.staging.discard()
        if (told := state.tell(error)) is None:
            raise
        raise told from error
    return SaveReport(written, time.perf_counter() - start)


@dataclass
class _State:
    """How far this rank came."""

    folder: Path
    reached: str = "planning"
    staging: Staging | None = None

    def tell(self, error: Exception) -> NdcompileError | None:
        """`error` with what was saved, and where; None if it says that by itself."""
        kind: type[NdcompileError]
        if isinstance(error, AgreementError):
            kind, reason = AgreementError, str(error)
        elif isinstance(error, dist.DistError):
            kind, reason = AgreementError, f"the ranks' store is lost ({error})"
        elif isinstance(error, OSError):
            kind, reason = CheckpointError, f"{error.filename or 'the file system'}: {error.strerror}"
        elif isinstance(error, CheckpointError) and self.staging is not None:
            kind, reason = CheckpointError, str(error)
        else:
            return None
        # While the first rank renames, the others cannot know on which side of it a fault came.
        unsure = kind is AgreementError and self.reached == _PUBLISHING
        state = "is complete, the old or the new one" if unsure else "is as it was"
        return kind(f"Saving to {self.folder} stopped while {self.reached}: {reason.rstrip('.')}. That folder {state}.")


_PUBLISHING = "putting the folder in place"


def _run_phases(compiled: CompiledModel, name: str, job: _Job, state: _State, variant: str | None) -> int:
    """Stage, write, compute, publish; returns the bytes that this rank wrote."""
    agreement, rank = compiled.agreement, dist.get_rank()
    token = agreement.exchange(f"{name}/begin", secrets.token_hex(4))[0]
    staging = state.staging = Staging.of(state.folder, token)
    with patience(agreement):
        agreement.same(f"{name}/plan", job.lines(state.folder), "what they save, and where")
        state.reached = "creating files"
        together(agreement, f"{name}/stage", _first(rank, lambda: stage(staging, job.files, job.scratch_bytes)))
        state.reached = "writing"
        written = _write(compiled, name, job, staging)
        state.reached = "computing keys"
        _compute(compiled, name, job, staging)
        state.reached = _PUBLISHING
        together(agreement, f"{name}/publish", _first(rank, lambda: _finish(compiled, job, staging, variant)))
    return written


def _is_to_remove(agreement: Agreement, name: str) -> bool:
    """After a fault: wait until no rank writes any more; then the first one removes what was staged.

    Without an answer from all, because a rank or the store is gone, every rank does.
    """
    try:
        if agreement.peer_gave_up() is None:
            with patience(agreement, _STOPPING):
                agreement.exchange(f"{name}-stopped/all", True)
            return agreement.rank == 0
    except (AgreementError, dist.DistError):
        pass
    return True


def _plan(compiled: CompiledModel, max_shard_size: int | str, variant: str | None, original_format: bool) -> _Job:
    model, store = compiled.model, compiled.store
    store.current()
    names = saved_names(model)
    if meta := [name for name, tensor in names.items() if tensor.is_meta]:
        raise NdcompileError(f"{meta[0]!r} is not loaded: call ndcompile.load(model, folder) before saving.")
    dtypes = {name: tensor.dtype for name, tensor in names.items()}
    tensors = saved_tensors(model, names, dtypes, original_format)
    shapes = {name: tensor.shape for name, tensor in names.items()}
    return _Job(names, dtypes, find_destinations(tensors, shapes), plan_files(tensors, max_shard_size, variant))


def _write(compiled: CompiledModel, name: str, job: _Job, staging: Staging) -> int:
    """Write this rank's bytes; returns their number."""
    device, rank = compiled.mesh.device, dist.get_rank()
    check_visible(staging, job.files, rank)
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()  # the writing thread is not on this thread's stream
    sources = sources_of(compiled.store, job.names)
    scratch = [staging.scratch(number) for number in range(len(job.destinations.scratch))]
    writes = list(rank_writes(sources, job.destinations, job.files, staging.path, scratch))
    total = sum(write.nbytes for write in writes)
    with transfer_progress("Saving weights", total, enabled=rank == 0) as advance:
        together(compiled.agreement, f"{name}/write", lambda stopped: execute(writes, advance, stopped))
    return total


def _compute(compiled: CompiledModel, name: str, job: _Job, staging: Staging) -> None:
    """Compute keys of whole tensors, which passed through scratch files: one group at a time, on one rank."""
    groups = sorted(job.destinations.computed.items(), key=lambda group: sorted(group[0]))
    if not groups:
        return
    if dist.get_rank() == 0:
        _logger.info("%d groups of keys are computed of whole tensors, such as %s", len(groups), groups[0][1][0].key)
    number_of = {source: number for number, source in enumerate(job.destinations.scratch)}

    def work(stopped: Callable[[], bool]) -> None:
        for sources, keys in groups[dist.get_rank() :: dist.get_world_size()]:
            if stopped():
                return
            whole = {
                source: _read(staging.scratch(number_of[source]), job.names[source].shape, job.dtypes[source])
                for source in sources
            }
            made = compute_keys(compiled.model, job.names, whole)
            writes = []
            for tensor in keys:
                file, offset = job.files.place[tensor.key]
                value = made[tensor.key]
                assert (value.shape, value.dtype) == (tensor.shape, tensor.dtype), tensor.key
                writes.append(plan_write(staging.path / file, offset, value.shape, (0,) * value.ndim, value))
            execute(writes, lambda nbytes: None, stopped)

    together(compiled.agreement, f"{name}/compute", work)


def _finish(compiled: CompiledModel, job: _Job, staging: Staging, variant: str | None) -> None:
    model: PreTrainedModel = compiled.model
    write_config(model, staging.path, job.files, variant)
    publish(staging, variant)


def _read(path: Path, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if not shape.numel():
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_file(str(path), shared=False, size=shape.numel(), dtype=dtype).reshape(shape)


def _first(rank: int, work: Callable[[], None]) -> Work[None]:
    """`work` on the first rank, nothing on the others."""
    return (lambda stopped: work()) if rank == 0 else (lambda stopped: None)
