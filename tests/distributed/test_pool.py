"""The harness itself: results, exceptions and hangs of ranks reach the test."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from pool import RankDied, RankError, RankTimeout


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


def _crash_where_missing(marker, leave):
    if dist.get_rank() == 1 and not marker.exists():
        if leave:
            marker.touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    return dist.get_rank()


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


def test_a_function_in_which_a_rank_crashed_runs_once_more(world, tmp_path):
    with pytest.warns(UserWarning, match="rank 1 died in _crash_where_missing"):
        assert world(2)(_crash_where_missing, tmp_path / "crashed", True) == [0, 1]


def test_a_function_that_crashes_again_fails(world, tmp_path):
    pool = world(2)
    with pytest.warns(UserWarning, match="once more"), pytest.raises(RankDied, match=r"rank 1 died .* \(-11\)"):
        pool(_crash_where_missing, tmp_path / "never", False)
    assert pool(_sum_of_ranks, 0) == [(0, 1.0), (1, 1.0)]
