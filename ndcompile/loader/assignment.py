"""Where the value of each target comes from, checked against the checkpoint's shapes before any byte is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ndcompile.loader.catalog import CheckpointError, Entry
from ndcompile.loader.conversion import convert_group
from ndcompile.loader.keys import ConversionGroup, KeyResolution
from ndcompile.loader.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Assignment:
    """The source of every target.

    `plain` are (target, checkpoint key); `groups` are (group, dtype its tensors are cast to before conversion, the
    targets it fills by the name it makes); `missing` have no source. `repeated` are (target, key) of further names of a
    tied tensor which the checkpoint holds as well and which are not used.
    """

    plain: tuple[tuple[Target, str], ...]
    groups: tuple[tuple[ConversionGroup, torch.dtype, Mapping[str, Target]], ...]
    missing: tuple[Target, ...]
    repeated: tuple[tuple[Target, str], ...]


def assign(
    model: PreTrainedModel, targets: Sequence[Target], catalog: Mapping[str, Entry], keys: KeyResolution
) -> Assignment:
    """Give every target its source: its own name first, then its aliases.

    Raises CheckpointError that lists every tensor whose shape in the checkpoint is not the model's, or names one that
    the checkpoint holds in two forms.
    """
    target_of = {name: target for target in targets for name in target.names}
    made = {group.name: _made_shapes(group, model, catalog, target_of) for group in keys.groups}
    group_of = {name: group for group in keys.groups for name in made[group.name]}
    if twice := sorted(keys.plain.keys() & group_of.keys()):
        raise CheckpointError(
            f"the checkpoint holds {twice[0]} both as it is and {_describe_sources(group_of[twice[0]], catalog)}"
        )
    plain: list[tuple[Target, str]] = []
    missing: list[Target] = []
    repeated: list[tuple[Target, str]] = []
    filled: dict[str, dict[str, Target]] = {}
    problems: list[str] = []
    for target in targets:
        found = [name for name in target.names if name in keys.plain or name in group_of]
        repeated += [(target, keys.plain[name]) for name in found[1:] if name in keys.plain]
        if not found:
            missing.append(target)
            continue
        name = found[0]
        if name in keys.plain:
            entry = catalog[keys.plain[name]]
            plain.append((target, keys.plain[name]))
            problems += _mismatch(target, entry.shape, entry.dtype, f"{keys.plain[name]} in {entry.file.name}")
        else:
            group = group_of[name]
            filled.setdefault(group.name, {})[name] = target
            stored = catalog[group.sources[0][0]].dtype
            problems += _mismatch(target, made[group.name][name].shape, stored, _describe_sources(group, catalog))
    if problems:
        raise CheckpointError(f"the checkpoint does not fit {type(model).__name__}:\n  " + "\n  ".join(problems))
    groups = tuple(
        (group, _cast_dtype(group, catalog, target_of), filled[group.name])
        for group in keys.groups
        # A rank without a part of anything that a group makes (another's experts) need not read it.
        if any(target.tensor.numel() for target in filled.get(group.name, {}).values())
    )
    return Assignment(tuple(plain), groups, tuple(missing), tuple(repeated))


def _made_shapes(
    group: ConversionGroup, model: PreTrainedModel, catalog: Mapping[str, Entry], target_of: Mapping[str, Target]
) -> dict[str, torch.Tensor]:
    """Meta tensors by the names that `group` makes."""
    dtype = _cast_dtype(group, catalog, target_of)
    return convert_group(group, model, lambda key: torch.empty(catalog[key].shape, dtype=dtype, device="meta"))


def _cast_dtype(group: ConversionGroup, catalog: Mapping[str, Entry], target_of: Mapping[str, Target]) -> torch.dtype:
    """transformers casts before it converts, to the dtype of the first tensor that the group makes."""
    if group.name in target_of:
        return target_of[group.name].tensor.dtype
    return catalog[group.sources[0][0]].dtype


def _mismatch(target: Target, shape: torch.Size, dtype: torch.dtype, source: str) -> list[str]:
    """What is wrong with a tensor of `shape` and `dtype` as the value of `target`."""
    if shape != target.shape:
        return [f"{target.fqn}: checkpoint {tuple(shape)}, model {tuple(target.shape)} ({source})"]
    if _kind(dtype) != _kind(target.tensor.dtype):
        # Integers for a float parameter are quantized weights, whose scales would be lost.
        return [f"{target.fqn}: checkpoint {dtype}, model {target.tensor.dtype} ({source})"]
    return []


def _kind(dtype: torch.dtype) -> str:
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "integer"


def _describe_sources(group: ConversionGroup, catalog: Mapping[str, Entry]) -> str:
    files = sorted({catalog[key].file.name for key, _ in group.sources})
    return f"made of {len(group.sources)} keys, {group.sources[0][0]} and on, in {', '.join(files)}"
