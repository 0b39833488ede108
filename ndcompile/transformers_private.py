"""Private symbols of transformers that ndcompile uses, each with the versions it was tried on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import transformers.masking_utils as masking_utils
from transformers.conversion_mapping import get_model_conversion_mapping  # transformers 5.24
from transformers.core_model_loading import (  # transformers 5.24
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.initialization import guard_torch_init_functions  # transformers 5.24
from transformers.utils.loading_report import LoadStateDictInfo, log_state_dict_report  # transformers 5.24

__all__ = [
    "LoadStateDictInfo",
    "WeightConverter",
    "WeightRenaming",
    "dot_natural_key",
    "get_model_conversion_mapping",
    "guard_torch_init_functions",
    "log_state_dict_report",
    "rename_source_key",
    "revert_weight_conversion",
    "unpacked_positions",
]


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
