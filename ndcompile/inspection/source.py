"""What a plan is made for: a model without weights, from a model, a configuration, a file, a folder or a Hub id."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ndcompile.errors import NdcompileError

EXPECTED = "Pass a transformers model, a config, config.json, a folder that holds one, or a Hub id in the local cache."


def model_of(source: PreTrainedModel | PretrainedConfig | str | os.PathLike[str]) -> PreTrainedModel:
    """The model of `source`: itself, or one on the meta device of the class that its config names.

    Nothing is downloaded. Raises TypeError for other objects, and NdcompileError for a config that cannot be read.
    """
    if isinstance(source, PreTrainedModel):
        return source
    if isinstance(source, PretrainedConfig):
        return _on_meta(source)
    if isinstance(source, str | os.PathLike):
        return _on_meta(_read(os.fspath(source)))
    raise TypeError(f"A plan cannot be made of a {type(source).__name__}. {EXPECTED}")


def _read(name: str) -> PretrainedConfig:
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise NdcompileError(f"The folder {path} holds no config.json. {EXPECTED}")
    try:
        return AutoConfig.from_pretrained(path if path.exists() else Path(_cached(name)).parent)
    except (OSError, ValueError, KeyError) as error:
        raise NdcompileError(f"The config of {name!r} cannot be read: {error}") from error


def _cached(name: str) -> str:
    try:
        return hf_hub_download(name, "config.json", local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise NdcompileError(
            f"{name!r} is neither a file, nor a folder, nor a Hub id in the local cache. Fill it first: hf download "
            f"{name} config.json"
        ) from error


def _on_meta(config: PretrainedConfig) -> PreTrainedModel:
    named: list[Any] = [getattr(transformers, name, None) for name in config.architectures or ()]
    dtype = config.dtype or torch.bfloat16
    with torch.device("meta"):
        if named and isinstance(named[0], type) and issubclass(named[0], PreTrainedModel):
            return named[0]._from_config(config, dtype=dtype)  # type: ignore[attr-defined]
        try:
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
        except ValueError as error:
            raise NdcompileError(
                f"transformers has no causal language model for a {type(config).__name__}, and a plan is one of those. "
                "Pass the model itself, or a config with `architectures`."
            ) from error
