"""The config of a call, and what of it the user said: transformers fills in sizes that were left out."""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from transformers.distributed import DistributedConfig


def read_config(model: nn.Module, given: DistributedConfig | dict[str, Any] | None) -> tuple[DistributedConfig, bool]:
    """The config of a call, or else of the model; and whether its tp_size is transformers' guess.

    With a tp_plan and without a tp_size transformers takes the whole world (WORLD_SIZE) for tp. That is no size that
    anybody asked for: on a user's mesh the sizes come from there. Next to another size it is not taken for a guess.
    """
    asked = given if given is not None else getattr(getattr(model, "config", None), "distributed_config", None)
    if asked is None:
        return DistributedConfig(), False
    config = DistributedConfig.from_dict(asked) if isinstance(asked, dict) else asked
    if config.tp_plan is None or (isinstance(asked, dict) and asked.get("tp_size") is not None):
        return config, False
    others = (config.dp_replicate_size or 1) * (config.fsdp_size or 1) * (config.pp_size or 1)
    return config, others == 1 and config.tp_size == int(os.environ.get("WORLD_SIZE", 1))
