"""Passes on the lowered graphs, which inductor runs behind its own, and its settings that would undo them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import fx

from ndcompile import collective_chains
from ndcompile.passes import bucket_collectives as bucket
from ndcompile.passes import overlap_communication as overlap
from ndcompile.torch_private import CustomGraphPass, get_hash_for_files

SCHEDULING: Mapping[str, Callable[[fx.Graph], None]] = {
    "bucket_collectives": bucket.bucket_collectives,
    "overlap_communication": overlap.overlap_communication,
}
"""Name of a pass -> the pass, in order."""

SOURCES = tuple(str(Path(str(module.__file__))) for module in (collective_chains, bucket, overlap))

KEEP_ORDER = {"reorder_for_peak_memory": False}
"""Inductor's memory pass would start every gather as late as it can."""


class Schedule(CustomGraphPass):
    """The passes of SCHEDULING but the disabled ones, as one pass of inductor."""

    def __init__(self, disabled: Collection[str] = ()) -> None:
        self.names = tuple(name for name in SCHEDULING if name not in disabled)

    def __call__(self, graph: fx.Graph) -> None:
        for name in self.names:
            SCHEDULING[name](graph)

    def uuid(self) -> str:
        """Part of inductor's cache keys."""
        return f"{get_hash_for_files(SOURCES).hex()} {self.names}"


def inductor_settings(disabled: Collection[str]) -> dict[str, Any]:
    """What of torch._inductor.config makes it run the passes and keep their order."""
    return {"post_grad_custom_post_pass": Schedule(disabled)} | KEEP_ORDER
