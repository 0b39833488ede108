"""Passes that inductor runs on the lowered graphs: settings by name, so that each can be disabled like a graph pass.

Both keep the order of collectives that the graph has, which is the same on all ranks: `overlap_communication` moves
starts and waits across other kernels only, `bucket_collectives` merges by the sizes of parameters. (By default inductor
lets the reordering swap collectives, by estimates of a rank's own kernels: ranks with other lengths of the sequence
could then wait for each other. `FIXED_ORDER` forbids it.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

SCHEDULING: Mapping[str, Mapping[str, Any]] = {
    # Gather a layer's weights while the layer before computes, and go on while gradients are being reduced, as far as
    # the estimated peak memory allows. Inductor leaves it out in deterministic mode, that is under tp.
    "overlap_communication": {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [
            "reorder_communication_preserving_peak_memory",
            "sink_waits_iterative",
            "reorder_communication_preserving_peak_memory",
        ],
    },
    # One gather and one reduce-scatter for several parameters: fewer launches, and copies of what is sent.
    # Gathers of parameters alone: merging those of the chunks of a loss would keep the logits of all chunks.
    "bucket_collectives": {"bucket_all_gathers_fx": "only_fsdp", "bucket_reduce_scatters_fx": "all"},
}
"""Name of a pass -> settings of torch._inductor.config, which torch 2.11 and 2.13 share."""

FIXED_ORDER = {
    "reorder_iterative_unsafe_collectives_reorder": False,
    "sink_waits_iterative_unsafe_collectives_reorder": False,
}
"""Settings of torch._inductor.config_comms: no collective starts before one that is before it in the graph."""


def inductor_settings(disabled: Collection[str]) -> dict[str, Any]:
    """The settings of all passes but the disabled ones."""
    return {key: value for name, patch in SCHEDULING.items() if name not in disabled for key, value in patch.items()}
