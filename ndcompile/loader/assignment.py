"""Where the value of each target comes from, checked against the checkpoint's shapes before any byte is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ndcompile.loader.catalog import CheckpointError, Entry
from ndcompile.loader.conversion import convert_group, trace_group
from ndcompile.loader.keys import ConversionGroup, KeyResolution, lost_sources
from ndcompile.loader.pieces import Piece, pieces_of
from ndcompile.loader.reshaping import Inexpressible
from ndcompile.loader.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class Source:
    """The global tensor of `target` as pieces of the checkpoint, made of `keys`."""

    target: Target
    keys: tuple[str, ...]
    pieces: Sequence[Piece]


@dataclass(frozen=True, eq=False)
class WholeGroup:
    """A group whose converter computes: its keys are read whole, cast to `dtype` and converted, on every rank.

    `filled` are its targets by the name that it makes, `reason` says why it is not a rearrangement.
    """

    group: ConversionGroup
    dtype: torch.dtype
    filled: Mapping[str, Target]
    reason: str


@dataclass(frozen=True)
class Assignment:
    """The source of every target.

    `missing` have none. `repeated` are (target, key) of further names of a tied tensor which the checkpoint holds as
    well and which are not used.
    """

    sources: tuple[Source, ...]
    whole: tuple[WholeGroup, ...]
    missing: tuple[Target, ...]
    repeated: tuple[tuple[Target, str], ...]


@dataclass(frozen=True, eq=False)
class _Made:
    """A tensor that the checkpoint gives: its shape, and its pieces, or None and why there are none."""

    shape: torch.Size
    pieces: Sequence[Piece] | None
    reason: str = ""


def assign(
    model: PreTrainedModel, targets: Sequence[Target], catalog: Mapping[str, Entry], keys: KeyResolution
) -> Assignment:
    """Give every target its source: its own name first, then its aliases.

    Raises CheckpointError that lists every tensor whose shape in the checkpoint is not the model's, every group that
    cannot be converted, and every tensor that the checkpoint holds in two forms.
    """
    target_of = {name: target for target in targets for name in target.names}
    problems: list[str] = []
    made: dict[str, tuple[_Made, ConversionGroup]] = {}
    for group in keys.groups:
        try:
            results = _convert(group, model, catalog, target_of)
        except CheckpointError as error:
            problems.append(f"{error}{_describe_lost(group)}")
            results = {}
        for name, result in results.items():
            if name in keys.plain:
                problems.append(f"{name} is in the checkpoint both as it is and {_describe(group, catalog)}")
            made[name] = (result, group)
    sources: list[Source] = []
    missing: list[Target] = []
    repeated: list[tuple[Target, str]] = []
    whole: dict[str, tuple[str, dict[str, Target]]] = {}
    for target in targets:
        found = [name for name in target.names if name in keys.plain or name in made]
        repeated += [(target, keys.plain[name]) for name in found[1:] if name in keys.plain]
        if not found:
            missing.append(target)
        elif (key := keys.plain.get(found[0])) is not None:
            entry = catalog[key]
            problems += _mismatch(target, entry.shape, [entry.dtype], f"{key} in {entry.file_names}")
            sources.append(Source(target, (key,), pieces_of(entry)))
        else:
            result, group = made[found[0]]
            stored = [catalog[key].dtype for key, _ in group.sources]
            where = f"{_describe(group, catalog)}{_describe_lost(group)}"
            problems += _mismatch(target, result.shape, stored, where)
            if result.pieces is None:
                whole.setdefault(group.name, (result.reason, {}))[1][found[0]] = target
            else:
                sources.append(Source(target, tuple(key for key, _ in group.sources), result.pieces))
    if problems:
        raise CheckpointError(f"the checkpoint does not fit {type(model).__name__}:\n  " + "\n  ".join(problems))
    groups = tuple(
        WholeGroup(group, _cast_dtype(group, catalog, target_of), whole[group.name][1], whole[group.name][0])
        for group in keys.groups
        if group.name in whole
    )
    return Assignment(tuple(sources), groups, tuple(missing), tuple(repeated))


def _convert(
    group: ConversionGroup, model: PreTrainedModel, catalog: Mapping[str, Entry], target_of: Mapping[str, Target]
) -> dict[str, _Made]:
    """What `group` makes by name, as pieces where its converter only moves elements."""
    dtype = _cast_dtype(group, catalog, target_of)
    try:
        traced = trace_group(group, model, catalog, dtype)
        # transformers casts to the dtype of the first tensor that the group makes, even if another has a finer one.
        if any(target_of[name].tensor.dtype != dtype for name in traced if name in target_of) and any(
            catalog[key].dtype != dtype for key, _ in group.sources
        ):
            raise Inexpressible(f"it makes tensors of other dtypes than {dtype}, to which all are cast first")
        return {name: _Made(value.shape, value.pieces) for name, value in traced.items()}
    except Inexpressible as error:
        reason = str(error)
    made = convert_group(group, model, lambda key: torch.empty(catalog[key].shape, dtype=dtype, device="meta"))
    return {name: _Made(value.shape, None, reason) for name, value in made.items()}


def _cast_dtype(group: ConversionGroup, catalog: Mapping[str, Entry], target_of: Mapping[str, Target]) -> torch.dtype:
    """transformers casts before it converts, to the dtype of the first tensor that the group makes."""
    if group.name in target_of:
        return target_of[group.name].tensor.dtype
    return catalog[group.sources[0][0]].dtype


def _mismatch(target: Target, shape: torch.Size, dtypes: Iterable[torch.dtype], source: str) -> list[str]:
    """What is wrong with a tensor of `shape`, stored in `dtypes`, as the value of `target`."""
    if shape != target.shape:
        return [f"{target.fqn}: checkpoint {tuple(shape)}, model {tuple(target.shape)} ({source})"]
    for dtype in dtypes:
        if _kind(dtype) != _kind(target.tensor.dtype):
            # Integers for a float parameter are quantized weights, whose scales would be lost.
            return [f"{target.fqn}: checkpoint {dtype}, model {target.tensor.dtype} ({source})"]
    return []


def _kind(dtype: torch.dtype) -> str:
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "integer"


def _describe(group: ConversionGroup, catalog: Mapping[str, Entry]) -> str:
    files = sorted({block.file.name for key, _ in group.sources for block in catalog[key].blocks})
    return f"made of {len(group.sources)} keys, {group.sources[0][0]} and on, in {', '.join(files)}"


def _describe_lost(group: ConversionGroup) -> str:
    lost = lost_sources(group)
    return f"; the checkpoint lacks {', '.join(lost[:8])}{', ...' if len(lost) > 8 else ''}" if lost else ""
