"""What CPython does beside a trace: frames that leave their chunk of the stack, and collections."""

import gc
import resource

import pytest

from ndcompile.private.python import making_graphs


def call(depth):
    return depth if depth == 0 else call(depth - 1)


def faults_of_calls_at_all_depths():
    """Page faults of 2,000 calls at every depth that may be the end of a chunk."""

    def at(depth):
        if depth:
            return at(depth - 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(2_000):
            call(1)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    return max(at(depth) for depth in range(200))


def test_calls_at_no_depth_leave_a_chunk_of_the_stack():
    assert making_graphs(faults_of_calls_at_all_depths)() < 500  # without room: thousands at some depth


def test_the_collector_pauses_and_goes_on_after_an_error():
    @making_graphs
    def function(seen, *, error):
        seen.append(gc.isenabled())
        raise error

    seen = []
    with pytest.raises(KeyError):
        function(seen, error=KeyError())
    assert seen == [False]
    assert gc.isenabled()
    assert function.__name__ == "function"
