"""What a search found, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Layout:
    """Sizes of a mesh. ep: number of expert shards."""

    dp_replicate: int
    fsdp: int
    tp: int
    ep: int = 1

    @property
    def data_ranks(self) -> int:
        """Ranks with different batches."""
        return self.dp_replicate * self.fsdp

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in vars(self).items() if size > 1) or "one rank"


@dataclass(frozen=True)
class Candidate:
    """A layout that fits. step: seconds. tokens: a second and rank. exposed: share of communication that kernels wait
    for. states: bytes of parameters, gradients and moments. peak: bytes."""

    layout: Layout
    step: float
    tokens: float
    exposed: float
    states: int
    peak: int


@dataclass(frozen=True)
class Unfit:
    """A legal layout that does not fit. peak: bytes; None where the states alone do not fit."""

    layout: Layout
    states: int
    peak: int | None

    @property
    def needed(self) -> int:
        """Bytes that the layout needs at least."""
        return self.peak or self.states


@dataclass(frozen=True)
class Illegal:
    """Layouts that the model cannot have, by the axis size that they share, and why."""

    where: str
    reason: str


@dataclass(frozen=True)
class SearchResult:
    """Layouts of `world` ranks, the fastest first. Prints as tables. advice: what would fit, where nothing does."""

    model: str
    world: int
    memory_bytes: int
    batch_size: int
    seq_len: int
    rates: str
    fitting: tuple[Candidate, ...]
    unfit: tuple[Unfit, ...]
    illegal: tuple[Illegal, ...]
    advice: str = ""

    def __str__(self) -> str:
        from ndcompile.inspection.search_table import search_table

        return search_table(self)
