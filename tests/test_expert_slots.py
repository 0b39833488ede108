"""The slot of each (token, expert) pair in the order of an expert group's ranks."""

from types import SimpleNamespace

import pytest
import torch

from ndcompile.capture.expert_exchange import Group, _slots

EXPERTS, LOCAL = 8, 2


def group(by_rank: bool) -> Group:
    """8 experts on tp=2 x ep_rest=2, whose shards stand in the order of the mesh or in that of the ranks."""
    plan = SimpleNamespace(count=EXPERTS, local=LOCAL)
    axes = (SimpleNamespace(axis=SimpleNamespace(by_rank=by_rank, size=size)) for size in (4, 2, 2))
    return Group(plan, *axes, {})


@pytest.mark.parametrize("by_rank", [False, True])
def test_every_expert_has_a_slot_of_its_own(by_rank):
    slots = _slots(torch.arange(EXPERTS), group(by_rank))
    assert sorted(slots.tolist()) == list(range(EXPERTS))
    assert (slots.tolist() == list(range(EXPERTS))) is not by_rank


@pytest.mark.parametrize("by_rank", [False, True])
@pytest.mark.parametrize("index", [-1, -5, EXPERTS, EXPERTS + 1, 2**16 + 3, -(2**16) + 3])
def test_an_index_that_names_no_expert_takes_the_slot_behind_the_last(by_rank, index):
    """Turned into the order of ranks, or cut to 16 bits, it would be that of an expert."""
    assert _slots(torch.tensor([[1, index]]), group(by_rank)).tolist()[1] == EXPERTS
