"""What a compiled model keeps of a call's signature: its graphs, and what the ranks agreed on."""

from __future__ import annotations

from dataclasses import dataclass, field

from ndcompile.capture.capture import Captured
from ndcompile.capture.graph_input import GraphInput
from ndcompile.graphs.recompute_choice import Stages
from ndcompile.lowering.lower import Compiled
from ndcompile.lowering.partition import Partitioner
from ndcompile.runtime.caches import CacheShards


@dataclass
class Program:
    """A compiled graph and the sizes that it serves.

    shards: what the cache's tensors are of the whole ones after a call. seconds: how long capture, passes and lowering
    took.
    """

    captured: Captured
    run: Compiled
    graphs: Partitioner
    inputs: list[GraphInput]
    has_collectives: bool
    shards: CacheShards = field(default_factory=CacheShards)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Signature:
    """All programs of one signature, and the collectives and the recomputing that the ranks agreed on for it."""

    programs: list[Program]
    collectives: list[str]
    recompute: Stages | None = None
