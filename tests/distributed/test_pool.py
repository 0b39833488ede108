"""The harness itself: results, exceptions and hangs of ranks reach the test."""

import time

import pytest
import torch
import torch.distributed as dist
from pool import RankError, RankTimeout


def _sum_of_ranks(offset):
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def _fail_on(bad):
    if dist.get_rank() in bad:
        raise ValueError(f"bad rank {dist.get_rank()}")


def _hang_on(bad):
    if dist.get_rank() == bad:
        time.sleep(600)


def test_results_come_in_rank_order(ranks):
    assert ranks(_sum_of_ranks, 1) == [(0, 10.0), (1, 10.0), (2, 10.0), (3, 10.0)]


def test_exceptions_name_their_ranks_and_the_pool_serves_again(world):
    pool = world(2)
    with pytest.raises(RankError, match=r"ranks \[1\] of 2 failed; rank 1:(?s:.*)bad rank 1"):
        pool(_fail_on, [1])
    assert pool.errors(_fail_on, [0, 1]) == [("ValueError", "bad rank 0"), ("ValueError", "bad rank 1")]
    assert pool(_sum_of_ranks, 0) == [(0, 1.0), (1, 1.0)]


def test_a_hang_ends_with_the_stacks_of_the_ranks(world):
    pool = world(2)
    pool(_sum_of_ranks, 0)
    with pytest.raises(RankTimeout, match=r"_hang_on did not end within 2 s on rank 1(?s:.*)in _hang_on"):
        pool(_hang_on, 1, timeout=2)
    assert not pool.processes
