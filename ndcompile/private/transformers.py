"""Private symbols of transformers that ndcompile uses, each with the versions it was tried on."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.fx.traceback as fx_traceback
import transformers.integrations.sdpa_attention as sdpa_attention
import transformers.masking_utils as masking_utils
from torch import nn
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping  # transformers 5.24
from transformers.core_model_loading import (  # transformers 5.24
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.initialization import guard_torch_init_functions  # transformers 5.24
from transformers.modeling_utils import remove_tied_weights_from_state_dict  # transformers 5.24
from transformers.utils.loading_report import LoadStateDictInfo, log_state_dict_report  # transformers 5.24

__all__ = [
    "AUXILIARY_LOSS",
    "CACHE_COUNTS",
    "CACHE_LENGTHS",
    "CACHE_MEMORY",
    "CACHE_NAMES",
    "CACHE_SIZES",
    "IMPLEMENTATIONS",
    "OUTPUT_FLAGS",
    "PREPARE_STATIC_CACHE",
    "SEEN_TOKENS",
    "STATIC_CACHE_SHAPE",
    "SWITCH_FOR_DECODING",
    "LoadStateDictInfo",
    "WeightConverter",
    "WeightRenaming",
    "configs_of",
    "copy_config_flags",
    "dot_natural_key",
    "get_model_conversion_mapping",
    "grouped_heads",
    "guard_torch_init_functions",
    "input_gradient_hooks",
    "log_state_dict_report",
    "marked_auxiliary_loss",
    "remove_tied_weights_from_state_dict",
    "rename_source_key",
    "revert_weight_conversion",
    "unpacked_positions",
]


AUXILIARY_LOSS = "load_balancing_loss_func"
"""Every MoE model of transformers with an auxiliary loss calls a function of its modeling file, of this name. 5.24."""

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What forwards call their key-value cache; 5.24 has the first name, and takes the others for a while."""
CACHE_LENGTHS = {"keys": 2, "values": 2, "indexer_keys": 1}
"""Attributes of a cache's layers -> the dim that grows with every token. 5.24."""
CACHE_COUNTS = ("cumulative_length", "cumulative_length_int")
"""Attributes of a cache's layers that count, as Python numbers, the tokens that a layer has seen. 5.24."""
CACHE_SIZES = {"batch_size": "batch", "max_cache_len": "capacity", "_is_croppable": "capacity"}
"""Attributes of a static cache's layers that follow from a size -> its name. `max_cache_len` is the capacity. 5.24."""
CACHE_MEMORY = {"lazy_initialization": ("keys", "values"), "lazy_initialization_indexer": ("indexer_keys",)}
"""Methods of a static cache's layers that allocate tensors, for states without tokens -> the tensors' names. 5.24."""
SEEN_TOKENS = "get_seq_length"
"""Method of a cache's layers: how many tokens a layer has seen; of a static one a tensor. 5.24."""

PREPARE_STATIC_CACHE = "_prepare_static_cache"
"""Method of a model: the cache of a `generate` with cache_implementation="static", called with keywords. 5.24."""

STATIC_CACHE_SHAPE = "_get_static_cache_init_shape"
"""Method of a model: heads and width by which `generate` allocates a static cache before chunks of a prompt; with None
the first call allocates it. 5.24."""

SWITCH_FOR_DECODING = "_optimize_model_for_decode"
"""Method of a model: a context in which `generate` decodes, on GPUs with another experts implementation. 5.24."""


def input_gradient_hooks(model: nn.Module) -> set[int]:
    """Ids of the hooks by which transformers lets embeddings' outputs require gradients: gradient checkpointing puts
    them there for torch's reentrant checkpoint, which a graph does not use. transformers 5.24."""
    handles = [handle for module in model.modules() for handle in getattr(module, "_require_grads_hooks", None) or ()]
    return {handle.id for handle in handles}


IMPLEMENTATIONS = {"attention": "_attn_implementation_internal", "experts": "_experts_implementation_internal"}
"""What forwards read in their config at every call to choose their code -> the attribute that stores it. 5.24."""
OUTPUT_FLAGS = ("_output_attentions", "output_hidden_states", "output_router_logits", "return_dict")
"""Attributes of a config that say what is returned by a call whose arguments do not say it. 5.24."""


def configs_of(model: nn.Module) -> list[PretrainedConfig]:
    """The configs that the modules of a model read, each once, with their sub-configs. transformers 5.24."""
    found: dict[int, PretrainedConfig] = {}
    waiting = [module.__dict__.get("config") for module in model.modules()]
    for config in waiting:  # grows
        if isinstance(config, PretrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def copy_config_flags(module: nn.Module, copied: nn.Module) -> None:
    """Let a copy of a module read in its config what the module's says now. Past the properties, which set sub-configs
    too. transformers 5.24."""
    waiting = [(module.__dict__.get("config"), copied.__dict__.get("config"))]
    for config, other in waiting:  # grows
        if not isinstance(config, PretrainedConfig) or not isinstance(other, PretrainedConfig):
            continue
        for name in (*IMPLEMENTATIONS.values(), *OUTPUT_FLAGS):
            if name in vars(config):
                vars(other)[name] = vars(config)[name]
        waiting += [(getattr(config, name, None), getattr(other, name, None)) for name in config.sub_configs]


@contextmanager
def marked_auxiliary_loss(model: nn.Module) -> Iterator[None]:
    """While active, nodes made by the router's auxiliary loss carry `auxiliary_loss` in `meta["custom"]`."""
    name = AUXILIARY_LOSS
    files = {sys.modules[kind.__module__] for module in model.modules() for kind in type(module).__mro__}
    originals = {file: vars(file)[name] for file in files if name in vars(file)}
    for file, function in originals.items():
        setattr(file, name, _marked(function))
    try:
        yield
    finally:
        for file, function in originals.items():
            setattr(file, name, function)


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with fx_traceback.annotate({"auxiliary_loss": True}):
            return function(*args, **kwargs)

    return call


@contextmanager
def unpacked_positions() -> Iterator[None]:
    """While active, position ids are known to be consecutive, so masks need no packed-sequence part.

    In eager mode transformers reads the values and finds that out by itself; fake tensors have none. Only for calls
    without `position_ids`, whose positions the model makes with arange. transformers 5.24.
    """
    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


@contextmanager
def grouped_heads() -> Iterator[None]:
    """While active, a single token attends to the keys and values as they are, one head for a group of query heads.

    transformers does so in eager mode; when it is compiled it repeats keys and values for every query head first, a
    copy of the whole cache every token. transformers 5.24.
    """
    original = sdpa_attention.is_torchdynamo_compiling
    sdpa_attention.is_torchdynamo_compiling = lambda: False
    try:
        yield
    finally:
        sdpa_attention.is_torchdynamo_compiling = original
