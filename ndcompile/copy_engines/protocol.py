"""Who copies what when: an all-gather and a reduce-scatter out of copies and flags.

Every rank owns memory that all ranks of the group can read and write: slots for gathers, slots for reductions, and
flags, one for every kind and writer. Work goes to lanes. HERE is where the model computes; the other two run beside it.
A lane does what it is given in order. What does not fit into a slot goes in chunks, which are numbered alike on all
ranks and take the slots in turn.

    gather   HERE    hear from all: fetched c - SLOTS         (they are done with my slot, if I need it)
                     copy my shard into my slot;  then, beside FETCH, to its place in my result
             FETCH   tell all: staged c;  hear from all: staged c
                     copy their shards out of their slots
                     tell all: fetched c
    wait     HERE    hear from all: fetched c                 (only if nothing was copied into my slot)

    reduce   HERE    finish chunk c - SLOTS, if it is not
             SEND    hear from all: added c - SLOTS           (they are done with their slots)
                     copy their rows of my gradient into their slots
                     tell all: sent c
    finish   HERE    hear from all: sent c
                     add my own row and those in my slot, in the order of ranks
                     tell all: added c

A parameter whose shard is in an arena, which all ranks can read too, is fetched from there, and not copied into a slot.
It may be written again when all have fetched it.

What runs beside the model needs no kernel: copies between GPUs are made by copy engines, flags by the streams. All
ranks begin and finish the same collectives in the same order, and a flag is heard behind all that it depends on, in the
order in which the host gives out work: lanes may share a queue of the GPU, where whoever waits holds up the others. So
nothing waits in a circle. `tests/test_copy_protocol.py` runs it in random orders, and in one queue a rank.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

from torch import Tensor

HERE, FETCH, SEND = LANES = ("here", "fetch", "send")
STAGED, FETCHED, SENT, ADDED = KINDS = range(4)
GATHER_SLOTS, REDUCE_SLOTS = 4, 8
"""What may be under way: the passes keep 512 MiB of gathers, and of reductions, ahead of what uses them."""
SLOT = 64 * 2**20
ALIGNED = 512
"""Bytes at whose multiples pieces begin in a slot."""

Copy = tuple[int, int, int]
"""To, from, bytes."""


class Lanes(Protocol):
    """Where operations go: to streams of a GPU, or, in tests, to memory of the host. Addresses are those of this
    process; a flag is an int32."""

    def copy(self, lane: str, copies: Sequence[Copy]) -> None:
        """In any order among each other."""

    def tell(self, lane: str, flags: Sequence[int], value: int) -> None:
        """Write, when what the lane did before can be seen by all."""

    def hear(self, lane: str, flags: Sequence[int], value: int) -> None:
        """Wait until each is at least `value`."""

    def add(self, lane: str, result: Tensor, own: Tensor, others: Tensor, rank: int, mean: bool) -> None:
        """Sum or mean in float32 of rows of all ranks, in their order: `own` and `others`, those of rank + 1 and so on
        up to the last rank, and of 0 to rank - 1."""

    def mark(self, lane: str) -> Any:
        """What `behind` waits for: all that the lane was given so far."""

    def behind(self, lane: str, mark: Any) -> None:
        """The lane goes on when what a mark stands for is done."""


@dataclass(frozen=True)
class Layout:
    """The memory of a rank: slots of gathers, slots of reductions, flags. slot: bytes, a multiple of ALIGNED."""

    ranks: int
    slot: int = SLOT

    def gathered(self, chunk: int) -> int:
        """Where the slot of a chunk begins."""
        return chunk % GATHER_SLOTS * self.slot

    def reduced(self, chunk: int) -> int:
        return (GATHER_SLOTS + chunk % REDUCE_SLOTS) * self.slot

    def flag(self, kind: int, writer: int) -> int:
        return (GATHER_SLOTS + REDUCE_SLOTS) * self.slot + (kind * self.ranks + writer) * 4

    @property
    def row(self) -> int:
        """What a rank sends to another one at a time."""
        return self.slot // (self.ranks - 1) // ALIGNED * ALIGNED

    @property
    def size(self) -> int:
        return self.flag(len(KINDS), 0)


@dataclass(frozen=True)
class Piece:
    """Bytes `begin` to `begin + size` of a rank's part of tensor `number`, at `at` in the slot (of each rank's row)."""

    number: int
    begin: int
    size: int
    at: int


@functools.lru_cache(4096)
def chunks(sizes: tuple[int, ...], room: int) -> tuple[tuple[Piece, ...], ...]:
    """Cut tensors of these sizes, in bytes, into chunks of at most `room`, a multiple of ALIGNED."""
    assert room >= ALIGNED
    assert room % ALIGNED == 0
    found: list[list[Piece]] = []
    at = room
    for number, size in enumerate(sizes):
        begin = 0
        while begin < size:
            if at == room:
                found.append([])
                at = 0
            piece = Piece(number, begin, min(size - begin, room - at), at)
            found[-1].append(piece)
            begin += piece.size
            at += aligned(piece.size)
    return tuple(map(tuple, found))


@dataclass(frozen=True)
class Sum:
    """A chunk of a reduction that was sent and is not added. begun: when the gradients were there."""

    chunk: int
    pieces: Sequence[Piece]
    results: Sequence[Tensor]
    gradients: Sequence[Tensor]
    mean: bool
    begun: Any


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes of this rank that all ranks of a group can reach. bases: addresses, in this process, of all ranks' memory.
    keep: what must live as long."""

    own: Tensor
    bases: Sequence[int]
    keep: object = None

    def everywhere(self, address: int) -> list[int] | None:
        """Where the ranks have what this rank has at an address; None if it is elsewhere."""
        offset = address - self.own.data_ptr()
        return [base + offset for base in self.bases] if 0 <= offset < len(self.own) else None


class Exchanges:
    """The gathers and reductions of one rank of a group.

    memory: laid out by `layout`. arenas: memory of shards, each alike on all ranks, for as long as somebody holds it.
    """

    def __init__(self, rank: int, layout: Layout, memory: Memory, lanes: Lanes) -> None:
        self.rank, self.layout, self.memory, self.lanes = rank, layout, memory, lanes
        self.bases = memory.bases
        self.arenas: WeakSet[Memory] = WeakSet()
        self.broken = False
        self.peers = [(rank + step) % layout.ranks for step in range(1, layout.ranks)]
        self.gathers = self.reductions = 0
        self.sums: deque[Sum] = deque()
        self.added = lanes.mark(HERE)

    @property
    def begun(self) -> dict[str, int]:
        """How many of each kind this rank has begun; where an error came in between, what no other rank says."""
        numbers = {"gathers": self.gathers, "reductions": self.reductions}
        return dict.fromkeys(numbers, -1 - self.rank) if self.broken else numbers

    def gather(self, results: Sequence[Tensor], shards: Sequence[Tensor]) -> tuple[int, Any, Any]:
        """Each result is the ranks' shards one behind the other. All contiguous, and of equal sizes on all ranks.

        Returns what `gathered` takes.
        """
        staged, direct = [], []
        arenas = list(self.arenas)
        for shard, result in zip(shards, results, strict=True):
            each = (shard.data_ptr(), result.data_ptr(), _bytes(shard))
            known = next(filter(None, (arena.everywhere(each[0]) for arena in arenas)), None)
            if known is None:
                staged.append(each)
            elif each[2]:
                direct.append((each, known))
        if direct:
            place = [(to + self.rank * size, shard, size) for (shard, to, size), _ in direct]
            fetch = [(to + p * size, known[p], size) for p in self.peers for (_, to, size), known in direct]
            self._exchange([], place, fetch)
        read = self.gathers if direct else 0
        for chunk in chunks(tuple(size for *_, size in staged), self.layout.slot):
            slot = self.layout.gathered(self.gathers)
            pieces = [(*staged[piece.number], piece) for piece in chunk]
            stage = [(self.bases[self.rank] + slot + p.at, shard + p.begin, p.size) for shard, _, _, p in pieces]
            place = [(to + self.rank * size + p.begin, shard + p.begin, p.size) for shard, to, size, p in pieces]
            fetch = [
                (to + peer * size + p.begin, self.bases[peer] + slot + p.at, p.size)
                for peer in self.peers
                for _, to, size, p in pieces
            ]
            self._exchange(stage, place, fetch)
        return read, self.lanes.mark(HERE), self.lanes.mark(FETCH)

    def gathered(self, read: int, placed: Any, end: Any) -> None:
        """HERE, which may be another stream by now, goes on when a gather has ended, and others have read what it gave
        them."""
        self.lanes.behind(HERE, placed)
        self.lanes.behind(HERE, end)
        if read:
            self.lanes.hear(HERE, self._heard(FETCHED), read)

    def _exchange(self, stage: Sequence[Copy], place: Sequence[Copy], fetch: Sequence[Copy]) -> None:
        lanes = self.lanes
        self.gathers += 1
        if stage:
            lanes.hear(HERE, self._heard(FETCHED), self.gathers - GATHER_SLOTS)
            lanes.copy(HERE, stage)
        lanes.behind(FETCH, lanes.mark(HERE))
        lanes.copy(HERE, place)
        lanes.tell(FETCH, self._told(STAGED), self.gathers)
        lanes.hear(FETCH, self._heard(STAGED), self.gathers)
        lanes.copy(FETCH, fetch)
        lanes.tell(FETCH, self._told(FETCHED), self.gathers)

    def reduce(self, results: Sequence[Tensor], gradients: Sequence[Tensor], mean: bool) -> tuple[int, Any]:
        """Each result is this rank's part of the sum, or mean, of the ranks' gradients. As `gather`, reversed.

        Returns what `reduced` takes, which makes the result.
        """
        lanes, begun = self.lanes, self.lanes.mark(HERE)
        lanes.behind(SEND, begun)
        sizes = tuple(map(_bytes, results))
        for chunk in chunks(sizes, self.layout.row):
            self.finish(self.reductions + 1 - REDUCE_SLOTS)
            sent = [copy for peer in self.peers for copy in self._rows(chunk, peer, sizes, gradients)]
            self.sums.append(Sum(self.reductions, chunk, results, gradients, mean, begun))
            self.reductions += 1
            lanes.hear(SEND, self._heard(ADDED), self.reductions - REDUCE_SLOTS)
            lanes.copy(SEND, sent)
            lanes.tell(SEND, self._told(SENT), self.reductions)
        return self.reductions, lanes.mark(SEND)

    def reduced(self, number: int, sent: Any) -> None:
        """HERE goes on when a reduction has ended, and others have what it gave them."""
        self.finish(number)
        self.lanes.behind(HERE, self.added)
        self.lanes.behind(HERE, sent)

    def finish(self, number: int) -> None:
        """Add the first `number` chunks, as far as they are not added yet."""
        while self.sums and self.sums[0].chunk < number:
            each = self.sums.popleft()
            self.lanes.behind(HERE, self.added)  # in the order of chunks, whatever stream is current
            self.lanes.behind(HERE, each.begun)
            self.lanes.hear(HERE, self._heard(SENT), each.chunk + 1)
            for piece in each.pieces:
                self._add(each, piece)
            self.lanes.tell(HERE, self._told(ADDED), each.chunk + 1)
            self.added = self.lanes.mark(HERE)

    def _rows(
        self, chunk: Sequence[Piece], to: int, sizes: Sequence[int], gradients: Sequence[Tensor]
    ) -> Iterator[Copy]:
        """Copies of a rank's part of my gradients into my row of that rank's slot."""
        row = (self.rank - to - 1) % self.layout.ranks
        slot = self.bases[to] + self.layout.reduced(self.reductions)
        for piece in chunk:
            place = slot + piece.at * (self.layout.ranks - 1) + row * aligned(piece.size)
            yield place, gradients[piece.number].data_ptr() + to * sizes[piece.number] + piece.begin, piece.size

    def _add(self, each: Sum, piece: Piece) -> None:
        result, gradient = each.results[piece.number].view(-1), each.gradients[piece.number].view(-1)
        start, length = (count // result.element_size() for count in (piece.begin, piece.size))
        own = gradient[self.rank * len(result) + start :][:length]
        others, stride = self.layout.ranks - 1, aligned(piece.size)
        begin = self.layout.reduced(each.chunk) + piece.at * others
        rows = self.memory.own[begin : begin + others * stride].view(others, stride)[:, : piece.size].view(result.dtype)
        self.lanes.add(HERE, result[start : start + length], own, rows, self.rank, each.mean)

    def _told(self, kind: int) -> list[int]:
        """Where the peers hear this rank."""
        return [self.bases[peer] + self.layout.flag(kind, self.rank) for peer in self.peers]

    def _heard(self, kind: int) -> list[int]:
        return [self.bases[self.rank] + self.layout.flag(kind, peer) for peer in self.peers]


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
