"""The config of a call, and what of it the user said: transformers fills in sizes that were left out."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from torch import nn
from transformers.distributed import DistributedConfig

from ndcompile.errors import MeshError


def config_of(given: DistributedConfig | dict[str, Any]) -> DistributedConfig:
    """What was given as a config. Raises MeshError for keys and values that it does not take: transformers drops keys
    that it does not know, so a plan under a misspelled one would not be applied."""
    if isinstance(given, DistributedConfig):
        return given
    known = [f.name for f in dataclasses.fields(DistributedConfig)]
    if unknown := sorted(set(given) - set(known)):
        raise MeshError(
            f"distributed_config has unknown keys {unknown}. Axes: dp_replicate_size, fsdp_size, tp_size, ep_size. "
            f"Other keys: {sorted(name for name in known if not name.endswith('_size'))}."
        )
    try:
        return DistributedConfig.from_dict(given)
    except ValueError as error:
        raise MeshError(f"distributed_config cannot be used: {error}") from error


def read_config(model: nn.Module, given: DistributedConfig | dict[str, Any] | None) -> tuple[DistributedConfig, bool]:
    """The config of a call, or else of the model; and whether its tp_size is transformers' guess.

    With a tp_plan and without a tp_size transformers takes the whole world (WORLD_SIZE) for tp. That is no size that
    anybody asked for: on a user's mesh the sizes come from there. Next to another size it is not taken for a guess.
    """
    asked = given if given is not None else getattr(getattr(model, "config", None), "distributed_config", None)
    if asked is None:
        return DistributedConfig(), False
    config = config_of(asked)
    if config.tp_plan is None or (isinstance(asked, dict) and asked.get("tp_size") is not None):
        return config, False
    others = (config.dp_replicate_size or 1) * (config.fsdp_size or 1) * (config.pp_size or 1)
    return config, others == 1 and config.tp_size == int(os.environ.get("WORLD_SIZE", 1))
