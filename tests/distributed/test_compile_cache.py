"""The cache of compiled graphs: plan and mesh are in its keys, so a start finds what was compiled for the same ones."""

import random

import torch
import workers
from torch import Tensor, nn
from torch._dynamo.utils import counters

import ndcompile

FSDP2, TP2, REVERSED = ((("fsdp", 2),),), ((("tp", 2),),), ((("fsdp", 2),), (1, 0))
"""Arguments of `workers.mesh`. Between FSDP2 and REVERSED the order of shards differs, and nothing else."""
RULES = {"up": "colwise", "down": "rowwise"}
OTHER_RULES = {"up": "colwise_gather_output"}


class Small(nn.Module):
    """Inductor compiles it in a second or two."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.scale = nn.Linear(8, 16), nn.Linear(16, 8), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu() * self.scale)


def _starts(starts, scale):
    """Of every start, whether it found its graph in the cache, compiled it, or could not cache it."""
    outcome = []
    for mesh, plan in starts:
        model = ndcompile.compile(Small(scale), workers.mesh(*mesh), distributed_config={"tp_plan": plan})
        before = counters["aot_autograd"].copy()
        x = torch.ones(2, 4, 8)
        with torch.no_grad():
            # of the largest element: one that nearly cancels is off by more of itself, for some of the numbers
            assert workers.error(model(x), Small(scale)(x)) < workers.LIMIT
        seen = counters["aot_autograd"] - before
        outcome.append([name for name in ("hit", "miss", "bypass") if seen[f"autograd_cache_{name}"]])
    return outcome


def test_another_mesh_or_rule_misses_what_was_cached_and_the_same_ones_hit(world):
    """A number that no run had before keeps this one from the graphs of earlier ones."""
    cases = [(FSDP2, {}), (REVERSED, {}), (TP2, RULES), (TP2, OTHER_RULES)]
    first, second = world(2)(_starts, cases + cases, random.random())
    assert first == 4 * [["miss"]] + 4 * [["hit"]]
    assert second == 8 * [["hit"]]  # what the first rank compiled
