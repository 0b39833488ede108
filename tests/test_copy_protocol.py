"""The copies and flags of gathers and reductions, in random orders of what ranks do at the same time."""

import ctypes
import itertools
import random
from collections import deque
from functools import partial

import pytest
import torch

from ndcompile.copy_engines.protocol import (
    ALIGNED,
    GATHER_SLOTS,
    HERE,
    KINDS,
    LANES,
    REDUCE_SLOTS,
    Exchanges,
    Layout,
    Memory,
    aligned,
    chunks,
)

QUEUES = (*LANES, "other")
"""`other` is a second stream of the model."""


class Queues:
    """The lanes of one rank: operations that wait to be run, copies one at a time."""

    def __init__(self, one):
        queue = deque()
        self.waiting = {lane: queue if one else deque() for lane in QUEUES}
        self.stream = HERE

    def do(self, lane, run, ready=lambda: True):
        self.waiting[self.stream if lane == HERE else lane].append((ready, run))

    def copy(self, lane, copies):
        for to, source, size in random.sample(copies, len(copies)):
            self.do(lane, partial(ctypes.memmove, to, source, size))

    def tell(self, lane, flags, value):
        for flag in flags:
            self.do(lane, partial(write, flag, value))

    def hear(self, lane, flags, value):
        for flag in flags:
            self.do(lane, lambda: None, lambda flag=flag: ctypes.c_int32.from_address(flag).value >= value)

    def add(self, lane, result, own, others, rank, mean):
        def run():
            rows = torch.cat([others, own[None]]).double()
            result.copy_(rows.mean(0) if mean else rows.sum(0))

        self.do(lane, run)

    def mark(self, lane):
        done = []
        self.do(lane, lambda: done.append(True))
        return done

    def behind(self, lane, mark):
        self.do(lane, lambda: None, lambda: bool(mark))


def write(address, value):
    ctypes.c_int32.from_address(address).value = value


class Ranks:
    """All ranks of a group in one process. A step runs the first operation of one lane of one rank."""

    def __init__(self, count, slot=ALIGNED * 6, one_queue=False):
        layout = Layout(count, slot)
        self.memory = [torch.zeros(layout.size, dtype=torch.uint8) for _ in range(count)]
        bases = [memory.data_ptr() for memory in self.memory]
        self.queues = [Queues(one_queue) for _ in range(count)]
        self.ranks = [
            Exchanges(rank, layout, Memory(self.memory[rank], bases), self.queues[rank]) for rank in range(count)
        ]
        self.layout, self.bases = layout, bases
        self.alive = []

    def arenas(self, sizes, dtype):
        """Tensors of these sizes for every rank, in memory that all can reach."""
        layout = list(itertools.accumulate((aligned(size * dtype.itemsize) for size in sizes), initial=0))
        owned = [torch.zeros(layout[-1], dtype=torch.uint8) for _ in self.ranks]
        for own, exchanges in zip(owned, self.ranks, strict=True):
            arena = Memory(own, [other.data_ptr() for other in owned])
            exchanges.arenas.add(arena)
            self.alive.append(arena)
        places = [slice(at, at + size * dtype.itemsize) for at, size in zip(layout, sizes, strict=False)]
        return [[own[place].view(dtype) for place in places] for own in owned]

    def switch(self, streams):
        stream = random.choice(streams)
        for queues in self.queues:
            queues.stream = stream

    def run(self, speeds):
        """Until all is done; `speeds` are how often each rank gets on beside the others, as some of its lanes do."""
        lanes = [queues.waiting[lane] for queues in self.queues for lane in QUEUES]
        weights = [speed * random.choice([1, 1, 30]) for speed in speeds for _ in QUEUES]
        while any(lanes):
            ready = [(lane, weight) for lane, weight in zip(lanes, weights, strict=True) if lane and lane[0][0]()]
            assert ready, "nobody gets on"
            (lane,) = random.choices([lane for lane, _ in ready], [weight for _, weight in ready])
            lane.popleft()[1]()


def collectives(ranks, rounds, streams=(HERE,)):
    """Give all ranks random gathers and reductions, and have them wait later; what they read is spoiled behind that.

    streams: one of which is current when a collective begins, or is waited for.

    Returns results beside what they must be.
    """
    expected, begun = [], []
    for _ in range(rounds):
        dtype = random.choice([torch.bfloat16, torch.float32])
        sizes = [random.randrange(1, 1500) for _ in range(random.choice([1, 2, 4]))]
        begin = random.choice([gather, reduce])
        ranks.switch(streams)
        waits, results = begin(ranks, dtype, sizes)
        expected += results
        begun.append(waits)
        while len(begun) > random.randrange(5):
            ranks.switch(streams)
            for wait in begun.pop(random.randrange(len(begun))):
                wait()
    for wait in itertools.chain(*begun):
        wait()
    return expected


def gather(ranks, dtype, sizes):
    count = len(ranks.ranks)
    shards = [[torch.randn(size).to(dtype) for size in sizes] for _ in range(count)]
    wholes = [[torch.zeros(count * size, dtype=dtype) for size in sizes] for _ in range(count)]
    ranks.alive += [shards, wholes]  # as a wrong protocol would write into what was freed
    rights = [torch.cat(parts) for parts in zip(*shards, strict=True)]
    direct = random.choice([0, len(sizes), random.randrange(len(sizes) + 1)])
    arenas = ranks.arenas(sizes[:direct], dtype)
    waits, expected = [], []
    for rank, exchanges in enumerate(ranks.ranks):
        given = computed(ranks, exchanges, shards[rank], arenas[rank])
        end = exchanges.gather(wholes[rank], given)
        seen = [torch.empty_like(whole) for whole in wholes[rank]]
        waits.append(partial(wait, exchanges, exchanges.gathered, end, given, wholes[rank], seen))
        expected += zip(seen, rights, strict=True)
    return waits, expected


def reduce(ranks, dtype, sizes):
    count, mean = len(ranks.ranks), random.random() < 0.5
    gradients = [[torch.randint(-8, 8, (count * s,)).to(dtype) for s in sizes] for _ in range(count)]
    results = [[torch.zeros(size, dtype=dtype) for size in sizes] for _ in range(count)]
    ranks.alive += [gradients, results]
    totals = [torch.stack(parts).double() for parts in zip(*gradients, strict=True)]
    totals = [(each.mean(0) if mean else each.sum(0)).to(dtype) for each in totals]
    waits, expected = [], []
    for rank, exchanges in enumerate(ranks.ranks):
        given = computed(ranks, exchanges, gradients[rank])
        end = exchanges.reduce(results[rank], given, mean)
        seen = [torch.empty_like(result) for result in results[rank]]
        waits.append(partial(wait, exchanges, exchanges.reduced, end, given, results[rank], seen))
        expected += zip(seen, [each.chunk(count)[rank] for each in totals], strict=True)
    return waits, expected


def computed(ranks, exchanges, values, where=()):
    """Tensors that have these values when HERE comes so far; the first of them are `where`."""
    given = [*where, *(torch.full_like(value, torch.nan) for value in values[len(where) :])]
    ranks.alive.append(given)
    for tensor, value in zip(given, values, strict=True):
        exchanges.lanes.do(HERE, partial(tensor.copy_, value))
    return given


def wait(exchanges, ended, end, given, results, seen):
    """As `group.Started` waits. Then the results are read, and what was given is overwritten."""
    ended(*end)
    for copy, result in zip(seen, results, strict=True):
        exchanges.lanes.do(HERE, partial(copy.copy_, result))
    for tensor in given:
        exchanges.lanes.do(HERE, partial(tensor.fill_, 99))


def speeds(count):
    return [random.choice([1, 1, 30]) for _ in range(count)]


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
def test_results_are_right_in_any_order_of_ranks_and_lanes(count, seed, one_queue):
    """Lanes may share a queue of the GPU, in which whoever waits holds up what was given out behind it."""
    random.seed(seed)
    torch.manual_seed(seed)
    ranks = Ranks(count, one_queue=one_queue)
    expected = collectives(ranks, 25)
    ranks.run(speeds(count))
    for found, right in expected:
        torch.testing.assert_close(found, right, rtol=0, atol=0 if found.dtype is torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_a_collective_may_begin_in_one_stream_and_be_waited_for_in_another(seed):
    random.seed(seed)
    torch.manual_seed(seed)
    ranks = Ranks(3)
    expected = collectives(ranks, 25, streams=(HERE, "other"))
    ranks.run(speeds(3))
    for found, right in expected:
        torch.testing.assert_close(found, right, rtol=0, atol=0 if found.dtype is torch.bfloat16 else 1e-6)


def _wrong_in_some_order(change, seeds=40, count=3):
    """Whether a changed protocol gives a wrong result, or stops, in at least one order."""
    for seed in range(seeds):
        random.seed(seed)
        torch.manual_seed(seed)
        ranks = Ranks(count)
        for queues in ranks.queues:
            change(ranks, queues)
        expected = collectives(ranks, 25)
        ranks.run(speeds(count))
        if any(not torch.allclose(found, right, rtol=0, atol=1e-6, equal_nan=False) for found, right in expected):
            return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_every_flag_is_needed(kind):
    def deaf(ranks, queues):
        flags_of_kind = {base + ranks.layout.flag(kind, writer) for base in ranks.bases for writer in range(3)}
        hear = queues.hear
        queues.hear = lambda lane, flags, value: hear(lane, [f for f in flags if f not in flags_of_kind], value)

    assert _wrong_in_some_order(deaf)


@pytest.mark.parametrize("kind", KINDS)
def test_hearing_one_chunk_early_is_wrong(kind):
    def early(ranks, queues):
        flags_of_kind = {base + ranks.layout.flag(kind, writer) for base in ranks.bases for writer in range(3)}
        hear = queues.hear
        queues.hear = lambda lane, flags, value: hear(lane, flags, value - (flags[0] in flags_of_kind))

    assert _wrong_in_some_order(early)


@pytest.mark.parametrize("lane", LANES)
def test_every_order_between_lanes_is_needed(lane):
    def apart(ranks, queues):
        behind = queues.behind
        queues.behind = lambda where, mark: None if where == lane else behind(where, mark)

    assert _wrong_in_some_order(apart)


def test_pieces_tile_every_tensor_and_fit_into_their_chunk():
    sizes, room = (1, 700, 512, 4096, 0, 3), 2 * ALIGNED
    found = chunks(sizes, room)
    for number, size in enumerate(sizes):
        pieces = [piece for chunk in found for piece in chunk if piece.number == number]
        assert [piece.begin for piece in pieces] == [sum(p.size for p in pieces[:i]) for i in range(len(pieces))]
        assert sum(piece.size for piece in pieces) == size
    for chunk in found:
        ends = [piece.at + piece.size for piece in chunk]
        assert all(piece.at % ALIGNED == 0 and piece.size > 0 for piece in chunk)
        assert all(piece.at >= end for piece, end in zip(chunk[1:], ends[:-1], strict=True))
        assert max(ends) <= room


def test_parts_of_the_memory_do_not_overlap():
    layout = Layout(8)
    slots = [(layout.gathered(chunk), layout.slot) for chunk in range(GATHER_SLOTS)]
    slots += [(layout.reduced(chunk), 7 * layout.row) for chunk in range(REDUCE_SLOTS)]
    flags = [(layout.flag(kind, writer), 4) for kind in KINDS for writer in range(8)]
    parts = sorted(slots + flags)
    assert all(begin + size <= after for (begin, size), (after, _) in itertools.pairwise(parts))
    assert layout.size == parts[-1][0] + 4 == 768 * 2**20 + 4 * 8 * 4
    assert layout.gathered(GATHER_SLOTS) == layout.gathered(0)
    assert layout.reduced(REDUCE_SLOTS) == layout.reduced(0)
