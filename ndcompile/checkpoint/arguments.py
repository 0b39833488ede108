"""`model.save_pretrained(...)` of a compiled model: transformers' arguments, each honoured or refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ndcompile.errors import UnsupportedError

_UPLOAD = (
    "Save to a folder, then upload it from one rank with huggingface_hub.upload_folder(folder_path=..., repo_id=...)."
)


def save_method(save: Callable[..., object]) -> Callable[..., None]:
    """The method, with transformers' signature. save: called with the folder and the options that are honoured."""

    def save_pretrained(
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        variant: str | None = None,
        token: str | bool | None = None,
        save_peft_format: bool = True,
        save_original_format: bool = True,
        distributed_checkpoint: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save as a Hugging Face folder; see `ndcompile.save_pretrained`. Call it on every rank.

        is_main_process is not needed: every rank writes its own bytes, and the first one the config. save_peft_format
        has no effect: a compiled model has no adapters of its own.
        """
        if state_dict is not None:
            _refuse("state_dict", "It saves the shards that the ranks hold. Leave the argument out, on every rank.")
        if push_to_hub or token is not None:
            _refuse("push_to_hub" if push_to_hub else "token", _UPLOAD)
        if distributed_checkpoint:
            _refuse(
                "distributed_checkpoint",
                "Use torch.distributed.checkpoint.save on get_model_state_dict(model), or leave the argument out: no "
                "rank gathers anything.",
            )
        if kwargs.pop("safe_serialization", True) is not True:
            _refuse("safe_serialization", "Only safetensors are written. Leave the argument out.")
        if kwargs:
            _refuse(sorted(kwargs)[0], "Leave the argument out.")
        save(save_directory, max_shard_size=max_shard_size, variant=variant, save_original_format=save_original_format)

    return save_pretrained


def _refuse(argument: str, remedy: str) -> None:
    raise UnsupportedError(f"save_pretrained({argument}=...) of a compiled model is not supported. {remedy}")
