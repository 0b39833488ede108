"""What a plan says, as frozen data: tables, pages and JSON are made from it alone.

All sizes are bytes, all times seconds, both of one rank and one training step (forward, backward, optimizer) unless a
field says otherwise. Layers that are placed alike are one row; `fqns` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SCHEMA = 1
"""Version of the JSON form. It grows when a field changes its meaning or goes away, not when one is added."""

Ranges = tuple[tuple[tuple[int, int], ...], ...]
"""Position of a rank -> the half-open index ranges that it holds of a dim; () for none."""


@dataclass(frozen=True)
class Figure:
    """A number and how it came about, in words and symbols that the report itself explains."""

    name: str
    value: float
    formula: str


@dataclass(frozen=True)
class ParameterRow:
    """Parameters of one kind. shape, local_shape: global, and of a rank's buffer, padding included.

    name: with `*` for the layers. placements: storage axis -> "R" or "S(dim)", packed shards "S(dim) x parts".
    rule: what placed it, such as "tp_plan['layers.*.self_attn.q_proj'] = colwise", "distributed_config.tp_plan[...]",
    or "default: replicated over tp". style: the TP or EP style. after_forward: "free" or "keep" the gathered weight.
    fsdp_rule: what said so. gathered_shape: inside the graph, whole over fsdp. trained: whether it has a gradient.
    cut_by: per dim, the storage axes that cut it, in order. ranges: per dim, what the ranks at each position along
    these axes hold, the last axis running fastest; padding is not in it.
    """

    name: str
    fqns: tuple[str, ...]
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    placements: Mapping[str, str]
    local_shape: tuple[int, ...]
    rule: str
    style: str
    after_forward: str
    expert: bool
    fsdp_rule: str = ""
    gathered_shape: tuple[int, ...] = ()
    trained: bool = True
    cut_by: tuple[tuple[str, ...], ...] = ()
    ranges: tuple[Ranges, ...] = ()


@dataclass(frozen=True)
class BoundaryRow:
    """A change of layout along one axis. module: with `*` for the layers. source, destination: I, R, P, S(dim).

    forward, backward: the collective of each, "" for none. nbytes: of the local tensor that enters. count: a step.
    """

    module: str
    axis: str
    source: str
    destination: str
    forward: str
    backward: str
    nbytes: int
    count: int


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind, axis, phase and purpose in the lowered graph.

    phase: forward or backward. purpose: parameters, gradients, activations, experts or other. nbytes: of the larger
    side (gathered, or not yet reduced or scattered), summed. sent: what a rank sends in a ring. seconds: by the rates.
    """

    kind: str
    axis: str
    ranks: int
    phase: str
    purpose: str
    count: int
    nbytes: int
    sent: int
    seconds: float


@dataclass(frozen=True)
class PassRow:
    """What one pass did to the graph: nodes by operator that came and went.

    changes: the nodes, as `dump.py` prints them, behind a sign: + added, - removed, ~ with other inputs or
    another type. Of layers that are alike only those that were traced, see `Report.layers`.
    """

    name: str
    summary: str
    nodes: int
    added: Mapping[str, int]
    removed: Mapping[str, int]
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PathStep:
    """A stretch of the critical path: consecutive nodes of one kind ("compute", or a collective and its axis); the last
    one may be what all kernels lose to communication that runs beside them."""

    what: str
    module: str
    phase: str
    seconds: float


@dataclass(frozen=True)
class SavedRow:
    """Tensors of one kind that forward keeps for backward. module: with `*` for the layers, "" outside of modules.

    operator: what made it. shape: local, of one tensor. nbytes: of all `count` together.
    """

    module: str
    operator: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    count: int


@dataclass(frozen=True)
class Report:
    """A sharding plan with what it costs.

    mesh: user axes (dp_replicate, fsdp, tp, ep) -> size. storage: storage axes -> size, in order, sizes of 1 left out.
    rates: name of the link and compute rates, and the rates. memory: parameters, gradients, optimizer, activations,
    peak, in this order. compute: floating point operations and their time. time: of a step, exposed communication.
    experts, notes: lines to print. layers: FQN of the layers' list, and index of a layer -> the traced one that stands
    for it. saved: what "activations" of memory is made of, the largest first. rank_strides: storage axis -> how far
    apart neighbours are; a rank's position on it is rank // stride % size.
    """

    model: str
    mesh: Mapping[str, int]
    storage: Mapping[str, int]
    batch_size: int
    seq_len: int
    parameters: tuple[ParameterRow, ...]
    boundaries: tuple[BoundaryRow, ...]
    collectives: tuple[CollectiveRow, ...]
    passes: tuple[PassRow, ...]
    memory: tuple[Figure, ...]
    compute: tuple[Figure, ...]
    time: tuple[Figure, ...]
    critical_path: tuple[PathStep, ...]
    rates: Mapping[str, float | str]
    experts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    schema: int = SCHEMA
    layer_list: str = ""
    layers: Mapping[str, int] = field(default_factory=dict)
    saved: tuple[SavedRow, ...] = ()
    rank_strides: Mapping[str, int] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.mesh["dp_replicate"] * self.mesh["fsdp"] * self.mesh["tp"]
