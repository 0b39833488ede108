"""What a rank would recompute to fit its budget of saved bytes, and what all ranks do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ndcompile.errors import PlanError
from ndcompile.loader.rank_reads import spell_bytes

Stages = tuple[int, ...]
"""How much of each layer backward recomputes, see `recompute.STAGES`; 0 is nothing."""


@dataclass(frozen=True)
class Choice:
    """The least recomputing that fits, or all of it. saved, outside: bytes kept, and those of no layer, with it."""

    stages: Stages
    budget: int
    saved: int
    outside: int


def common(choices: Sequence[Choice]) -> Stages:
    """What all ranks recompute: of each layer as much as any of them needs to.

    Raises PlanError if one of them cannot fit its budget.
    """
    rank, worst = max(enumerate(choices), key=lambda item: item[1].saved - item[1].budget)
    if worst.saved > worst.budget:
        raise PlanError(
            f"memory_budget={spell_bytes(worst.budget)} is too small: rank {rank} keeps {spell_bytes(worst.saved)} "
            f"({worst.saved} bytes) between forward and backward at least, {spell_bytes(worst.outside)} of them "
            "outside of the layers, such as logits. Raise the budget to that, give a rank fewer sequences or tokens, "
            "or shard activations by tp; with loss_only=True no logits are kept."
        )
    return tuple(map(max, zip(*(choice.stages for choice in choices), strict=True)))


def alone(choice: Choice) -> Stages:
    """What a rank without others recomputes."""
    return common([choice])
