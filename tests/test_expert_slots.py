"""The slot of each (token, expert) pair in the order of an expert group's ranks."""

from types import SimpleNamespace

import pytest
import torch

from ndcompile.capture import expert_exchange
from ndcompile.capture.expert_exchange import Group, _slots, exchange_with_capacity

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


class Shared:
    """An axis of tp=2 as its last rank sees it: it has the second half of the tokens, padded with zeros."""

    axis = SimpleNamespace(by_rank=True, size=2)

    def move(self, x: torch.Tensor, how: tuple[str, str], size: int | None = None) -> torch.Tensor:
        if how != ("I", "S(0)"):
            return x
        part = -(-size // 2)
        return torch.cat([x, x.new_zeros(2 * part - size, *x.shape[1:])])[part:]


class Alone(Shared):
    def move(self, x: torch.Tensor, how: tuple[str, str], size: int | None = None) -> torch.Tensor:
        return x


def test_padding_takes_no_room_in_the_order_of_ranks(monkeypatch):
    """7 tokens on tp=2: the last rank has 3 and one of padding. Rank 2 of the group has room for two rows."""
    monkeypatch.setattr(expert_exchange, "all_to_all", lambda x, *_: x)  # what is sent comes back
    plan = SimpleNamespace(fqn="e", count=EXPERTS, local=LOCAL, ep=4, exchange="capacity", capacity=1.0)
    ranks = SimpleNamespace(axis=SimpleNamespace(by_rank=True, size=4, group=None))
    group = Group(plan, ranks, Shared(), Alone(), {})
    expert = {int(slot): number for number, slot in enumerate(group.position(torch.arange(EXPERTS)))}
    index = torch.tensor([[expert[0], expert[2]]] * 6 + [[expert[5], expert[2]]])  # ranks 0 and 1; 2 and 1
    hidden = torch.arange(1.0, 8.0)[:, None]
    output = exchange_with_capacity(lambda rows, _, weights: rows * weights, hidden, index, torch.ones(7, 2), group)
    assert output.flatten().tolist() == [5 + 5, 6 + 6, 7, 0]  # rank 1 has room for two of three
    assert group.dropped["e"].item() == 1
