"""What the proof knows of a value: how the one that a rank holds relates to the value of the same code without tp."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

ONCE = Fraction(1)

EXCHANGED = "X"
"""Kind of values of the exchange of tokens between experts, whose layouts are not checked."""
OWN = "own"
"""Kind of values that depend on the rank's index, see `Fact.role`."""


@dataclass(frozen=True)
class Fact:
    """One value along the tp axis.

    kind: I, R, P and S as in `redistribute.py`, OWN or EXCHANGED.
    dim, parts: of S: the sharded dim, and of how many parts it consists that are each sharded by themselves (2 for a
        fused gate and up projection). A plain shard has one part.
    scale: how many times the true value it is; the sum over the ranks of a shard's means is tp times the mean.
    uniform: every element is the same number, so that it does not matter which part of it a rank holds. zero: it is 0.
    role: of OWN: "coordinate" (the rank's index), "offset" (index x rows), "index" (into this rank's rows, and others
        out of range), "mask" (of those in range; `bounds` says which ends were compared), "row" (an index in range),
        "rows" (those looked up).
    rows: of an own offset, index, mask and row: the rows of one rank.
    """

    kind: str
    dim: int = 0
    parts: int = 1
    scale: Fraction = ONCE
    uniform: bool = False
    zero: bool = False
    role: str = ""
    rows: int = 0
    bounds: frozenset[str] = frozenset()

    @property
    def varies(self) -> bool:
        """Whether the ranks hold different values, so that the gradient of what meets it is partial."""
        return self.kind in ("S", "P", OWN, EXCHANGED)

    def __str__(self) -> str:
        """As examples of the table spell it."""
        parts = f" x {self.parts}" if self.parts > 1 else ""
        scale = f" times {self.scale}" if self.scale != 1 else ""
        return {"S": f"S({self.dim}){parts}", OWN: self.role}.get(self.kind, self.kind) + scale

    def words(self) -> str:
        """For a message."""
        packed = f" in {self.parts} parts" if self.parts > 1 else ""
        times = f", {self.scale} times the true value" if self.scale != 1 else ""
        return MEANING[self.kind].format(dim=self.dim, role=self.role) + packed + times


MEANING = {
    "I": "the same on all ranks",
    "R": "the same on all ranks and its gradient a sum over them",
    "S": "a shard on dim {dim}",
    "P": "a partial sum",
    OWN: "this rank's {role}",
    EXCHANGED: "of the exchange of tokens",
}

INVARIANT, REPLICATED, PARTIAL = Fact("I"), Fact("R"), Fact("P")


def shard_on(dim: int, parts: int = 1) -> Fact:
    return Fact("S", dim, parts)


class NotProven(Exception):
    """A rule does not hold: the reason, and what repairs it."""

    def __init__(self, reason: str, repair: str) -> None:
        super().__init__(reason)
        self.reason, self.repair = reason, repair


KEEP_WHOLE = (
    "Keep the projections around it whole in tp_plan: 'colwise_gather_output' in front, 'rowwise_split_input' behind."
)
SUM_FIRST = "Sum it before, with 'rowwise' or 'all_reduce' in tp_plan."
SUM_GRADIENT = (
    "Keep the pass 'complete_boundaries' enabled, or give the module that holds it 'replicated_with_grad_allreduce'."
)
"""Repairs that several rules name."""
