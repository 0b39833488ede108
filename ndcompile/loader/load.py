"""Fill this rank's tensors from a safetensors checkpoint."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ndcompile.loader.absence import Absence, check_absence, find_absence, log_absence, no_match
from ndcompile.loader.assignment import Assignment, WholeGroup, assign
from ndcompile.loader.catalog import CheckpointError, Entry, read_catalog
from ndcompile.loader.checksum import Peers, verify_checksums
from ndcompile.loader.conversion import convert_group
from ndcompile.loader.initialization import initialize_missing
from ndcompile.loader.keys import resolve_keys
from ndcompile.loader.pieces import pieces_of
from ndcompile.loader.progress import transfer_progress
from ndcompile.loader.reading import execute, plan_reads
from ndcompile.loader.source import resolve_source
from ndcompile.loader.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_logger = logging.getLogger("ndcompile.loader")


@dataclass(frozen=True)
class LoadReport:
    """What a load did on this rank. `bytes_read` counts bytes of files, `seconds` wall time; checksums of `verified`
    tensors were compared, whose bytes are not counted."""

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    bytes_read: int
    seconds: float
    verified: int = 0


def load_into(
    model: PreTrainedModel,
    targets: Sequence[Target],
    source: str | os.PathLike[str],
    *,
    progress: bool = False,
    strict: bool = True,
    verify: Peers | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> LoadReport:
    """Fill `targets`, this rank's tensors of `model`, from the safetensors checkpoint `source`, a folder or a Hub id.

    `model` is read for names, key conversion, ties and `_init_weights` only. The dtype of a target wins over the
    checkpoint's. Each rank reads what it holds by itself: there are no collectives. Everything is checked before the
    first tensor is read, with the same outcome on every rank.

    A parameter that the checkpoint lacks is an error, unlike in transformers, where it is initialised anew with a
    warning: a lost file or a wrong folder would train from noise. The exceptions are those in which transformers users
    expect it: names in `_keys_to_ignore_on_load_missing`, ties, and the head of a model whose checkpoint is the bare
    base model. A key that the model does not know is an error too, because the config may be that of a smaller model,
    unless it is a head's and the model a base model. `strict=False` gives transformers' behaviour; new values depend on
    the FQN alone, so that every rank and mesh agrees. Missing and unexpected keys are logged once, on the rank at the
    origin of the mesh, worded as transformers words them. `progress` shows a bar if stderr is a terminal. With
    `verify`, all ranks compare checksums of what they hold with those of the files, which reads the checkpoint once
    more, a part on each rank. `stopped` is asked between reads: once it is true the load is given up.

    Raises CheckpointError: no checkpoint, files missing, truncated or corrupt, keys missing, ambiguous or of another
    shape (all of them listed), quantized weights, a missing tensor that the model does not initialise.
    Raises ValueError if `targets` leave out a tensor of the state dict, buffers included: it would stay unloaded in
    silence.
    """
    start = time.perf_counter()
    if unallocated := [target.fqn for target in targets if target.tensor.is_meta]:
        raise ValueError(f"{unallocated[0]} is on the meta device: allocate it before loading")
    _check_complete(model, targets)
    folder = resolve_source(source)
    catalog = read_catalog(folder)
    _refuse_quantized(model, folder)
    assignment, absence = match(model, targets, catalog, folder, strict=strict)
    # Before the transfer, because it raises for a tensor that the model gives no value.
    initialize_missing(model, assignment.missing)
    bytes_read = _transfer(model, assignment, catalog, progress, stopped)
    verified = 0 if verify is None else verify_checksums(model, assignment, catalog, verify)
    if _at_origin(targets):
        log_absence(model, folder, absence, _logger)
        _log_whole(assignment.whole)
        _warn_of_unequal_ties(assignment, catalog)
    seconds = time.perf_counter() - start
    return LoadReport(absence.missing_keys, absence.unexpected_keys, bytes_read, seconds, verified)


def match(
    model: PreTrainedModel,
    targets: Sequence[Target],
    catalog: Mapping[str, Entry],
    folder: str | os.PathLike[str],
    *,
    strict: bool = True,
) -> tuple[Assignment, Absence]:
    """The source of every target, and the keys that are missing or unexpected; `folder` names the checkpoint in errors.

    Reads nothing, so targets may be on the meta device. Raises CheckpointError as `load_into` does.
    """
    keys = resolve_keys(model, catalog)
    assignment = assign(model, targets, catalog, keys)
    absence = find_absence(model, {name for target in assignment.missing for name in target.names}, keys.unexpected)
    if targets and len(assignment.missing) == len(targets):
        raise no_match(model, folder, catalog)
    if strict:
        check_absence(model, folder, catalog, keys, absence, len(targets))
    return assignment, absence


def _check_complete(model: PreTrainedModel, targets: Sequence[Target]) -> None:
    covered = {name for target in targets for name in target.names}
    saved = [name for name in model.state_dict(keep_vars=True) if not name.endswith("_extra_state")]
    if left_out := [name for name in saved if name not in covered]:
        raise ValueError(f"no target for tensors that the model saves: {', '.join(left_out)}")


def _at_origin(targets: Sequence[Target]) -> bool:
    """Whether this is the one rank of the mesh that reports."""
    return all(index == 0 for target in targets for index in target.coordinate)


def _refuse_quantized(model: PreTrainedModel, folder: Path) -> None:
    """Quantized weights need their scales; cast as plain numbers they would be silently wrong."""
    path = folder / "config.json"
    config = json.loads(path.read_bytes()) if path.is_file() else {}
    if config.get("quantization_config") or getattr(model.config, "quantization_config", None):
        raise CheckpointError(
            f"{folder} or the model's config has a quantization_config: quantized checkpoints cannot be loaded. If the "
            "weights are stored in full precision, remove it."
        )


def _transfer(
    model: PreTrainedModel,
    assignment: Assignment,
    catalog: Mapping[str, Entry],
    progress: bool,
    stopped: Callable[[], bool],
) -> int:
    """Read everything that has a source; returns the bytes read."""
    reads = [read for source in assignment.sources for read in plan_reads(source.pieces, source.target.rectangles())]
    # A rank without a part of anything that a group makes (another's experts) need not read it.
    needed = [w for w in assignment.whole if any(target.tensor.numel() for target in w.filled.values())]
    grouped = sum(catalog[key].nbytes for whole in needed for key, _ in whole.group.sources)
    total = sum(read.nbytes for read in reads) + grouped
    with transfer_progress("Loading weights", total, enabled=progress) as show:

        def advance(nbytes: int) -> None:
            if stopped():
                raise CheckpointError("the load was stopped, as another rank failed")
            show(nbytes)

        bytes_read = execute(reads, advance)
        for whole in needed:
            bytes_read += _fill_converted(model, whole, catalog, advance)
    return bytes_read


def _fill_converted(
    model: PreTrainedModel, whole: WholeGroup, catalog: Mapping[str, Entry], advance: Callable[[int], None]
) -> int:
    """Read all of a group, convert it and keep this rank's part; returns the bytes read."""
    keys = [key for key, _ in whole.group.sources]
    tensors = {key: torch.empty(catalog[key].shape, dtype=whole.dtype, device="cpu") for key in keys}
    reads = [
        read
        for key, tensor in tensors.items()
        for read in plan_reads(pieces_of(catalog[key]), [(_origin(tensor), tensor)])
    ]
    bytes_read = execute(reads, advance)
    converted = convert_group(whole.group, model, tensors.__getitem__)
    for name, target in whole.filled.items():
        target.fill(converted[name])
    return bytes_read


def _log_whole(groups: Sequence[WholeGroup]) -> None:
    """Say which tensors every rank reads whole: it costs time and memory."""
    if groups:
        _logger.warning(
            "%d groups of keys are read and converted whole on every rank, such as that of %s: %s",
            len(groups),
            groups[0].group.name,
            groups[0].reason,
        )


def _origin(tensor: torch.Tensor) -> tuple[int, ...]:
    return (0,) * tensor.ndim


def _warn_of_unequal_ties(assignment: Assignment, catalog: Mapping[str, Entry]) -> None:
    """transformers unties such tensors; here the tie of the model stands, but not in silence."""
    for target, key in assignment.repeated:
        other = torch.empty(target.tensor.shape, dtype=target.tensor.dtype, device="cpu")
        if catalog[key].shape == target.shape:
            execute(plan_reads(pieces_of(catalog[key]), target.rectangles(other)))
            if torch.equal(other, target.tensor.detach().cpu()):
                continue
        _logger.warning(
            "The tied weights mapping and config for this model specifies to tie %s to %s, but both are present in the "
            "checkpoint with different values: those of %s are used. Set `tie_word_embeddings=False` in the config to "
            "load both.",
            key,
            target.fqn,
            target.fqn,
        )
