"""Keys that the checkpoint lacks or has too many: which of them are errors, and one report of the rest."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ndcompile.loader.catalog import CheckpointError
from ndcompile.private.transformers import LoadStateDictInfo, log_state_dict_report

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ndcompile.loader.catalog import Entry
    from ndcompile.loader.keys import KeyResolution


@dataclass(frozen=True)
class Absence:
    """What transformers would report: FQNs without a key and keys without a tensor."""

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]


def find_absence(model: PreTrainedModel, missing: Collection[str], unexpected: Collection[str]) -> Absence:
    """`missing` and `unexpected` without what the model tells transformers to ignore."""
    info = _loading_info(missing, unexpected)
    model._adjust_missing_and_unexpected_keys(info)
    return Absence(tuple(sorted(info.missing_keys)), tuple(sorted(info.unexpected_keys)))


def check_absence(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    catalog: Mapping[str, Entry],
    keys: KeyResolution,
    absence: Absence,
    expected: int,
) -> None:
    """Raise CheckpointError for a missing parameter, except for the head when `keys` come from a base model, and for a
    key that the model does not know, except for a head's when the model is a base model.

    Missing persistent buffers are no error: older checkpoints lack them and `_init_weights` knows their value.
    """
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    prefix = f"{model.base_model_prefix}."
    lost = [
        name
        for name in absence.missing_keys
        if name not in buffers and not (keys.from_base_model and not name.startswith(prefix))
    ]
    if lost:
        raise CheckpointError(
            f"the checkpoint in {folder} lacks {len(lost)} of the {expected} tensors of {type(model).__name__}: "
            f"{_listing(lost)}{_hint(absence)}\nPass strict=False to initialise them anew, as from_pretrained does."
        )
    left_over = sorted({keys.unexpected[name] for name in absence.unexpected_keys if name in keys.unexpected})
    if model.base_model is model and any(key.startswith(prefix) for key in catalog):
        left_over = [key for key in left_over if key.startswith(prefix)]
    if left_over:
        listed = [f"{key} {tuple(catalog[key].shape)} in {catalog[key].file_names}" for key in left_over]
        raise CheckpointError(
            f"the checkpoint in {folder} holds {len(left_over)} keys that {type(model).__name__} does not know: "
            f"{_listing(listed)}\nThe config may be that of a smaller model. Pass strict=False to leave them out, as "
            "from_pretrained does."
        )


def no_match(model: PreTrainedModel, folder: str | os.PathLike[str], catalog: Mapping[str, object]) -> CheckpointError:
    """The error for a checkpoint without any tensor of the model: it belongs to another model."""
    return CheckpointError(
        f"no key of the checkpoint in {folder} belongs to {type(model).__name__}; it holds "
        f"{_listing(sorted(catalog)) or 'nothing'}"
    )


def log_absence(
    model: PreTrainedModel, folder: str | os.PathLike[str], absence: Absence, logger: logging.Logger
) -> None:
    """Log transformers' own report of `absence` as one warning; nothing if there is nothing to tell."""
    info = _loading_info(absence.missing_keys, absence.unexpected_keys)
    log_state_dict_report(model, str(folder), False, info, logger)


def _loading_info(missing: Collection[str], unexpected: Collection[str]) -> LoadStateDictInfo:
    return LoadStateDictInfo(
        missing_keys=set(missing),
        unexpected_keys=set(unexpected),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )


def _listing(names: Collection[str], most: int = 20) -> str:
    text = ", ".join(list(names)[:most])
    return f"{text} and {len(names) - most} more" if len(names) > most else text


def _hint(absence: Absence) -> str:
    if not absence.unexpected_keys:
        return ""
    return f"\nIt has keys that the model does not know: {_listing(absence.unexpected_keys)}"
