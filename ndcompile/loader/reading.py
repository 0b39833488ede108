"""Read plan and its execution: strided bytes of files into views of local tensors, with preadv.

Never a memory map: a mapped file that is rewritten changes the loaded model, and one that is truncated kills the
process. No collectives: a rank reads what it holds and nothing can hang.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ndcompile.loader.catalog import CheckpointError, Entry

STAGING_BYTES = 8 << 20
# A gap up to this size is read with the runs around it: a call costs about 5 us, as much as copying 30 KiB from the
# page cache, and disks read whole pages anyway.
MAX_GAP_BYTES = 16 << 10
# Bytes per call when reading straight into a parameter, so that progress moves.
_CALL_BYTES = 64 << 20
# Cold files read 1.2 times as fast with two threads as with one, and no faster with four or eight; from the page cache
# the number makes no difference. The ranks of a host read side by side besides.
_WORKERS = 2


@dataclass(frozen=True, eq=False)
class Read:
    """Elements of `dtype` at byte `offset` of `file`, `strides` bytes apart per dim of `destination`."""

    file: Path
    offset: int
    strides: tuple[int, ...]
    dtype: torch.dtype
    destination: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the file that the destination needs."""
        return self.destination.numel() * self.dtype.itemsize

    def dims(self) -> list[tuple[int, int, int]]:
        """(stride, size, dim) of every dim longer than 1, innermost in the file first."""
        sizes = enumerate(self.destination.shape)
        return sorted((self.strides[dim], size, dim) for dim, size in sizes if size > 1)

    def run(self) -> tuple[int, list[tuple[int, int, int]]]:
        """Bytes of one contiguous run in the file, and the dims over which runs repeat, innermost first."""
        run, dims = self.dtype.itemsize, self.dims()
        while dims and dims[0][0] == run:
            run *= dims.pop(0)[1]
        return run, dims

    def part(self, dim: int, start: int, length: int) -> Read:
        """The read of `length` indices of `dim` from `start`."""
        offset = self.offset + start * self.strides[dim]
        return replace(self, offset=offset, destination=self.destination.narrow(dim, start, length))


def plan_reads(entry: Entry, rectangles: Iterable[tuple[tuple[int, ...], torch.Tensor]]) -> list[Read]:
    """Reads that fill `rectangles`, (global offset, destination view) pairs, from the checkpoint tensor `entry`."""
    strides = tuple(entry.dtype.itemsize * math.prod(entry.shape[dim + 1 :]) for dim in range(len(entry.shape)))
    return [
        Read(entry.file, entry.offset + sum(map(int.__mul__, offset, strides)), strides, entry.dtype, view)
        for offset, view in rectangles
        if view.numel()
    ]


def execute(reads: Iterable[Read], advance: Callable[[int], None] = lambda nbytes: None) -> int:
    """Perform `reads`, sorted by file and offset; returns the bytes read, gaps between near runs included.

    `advance(nbytes)` is called from worker threads as destinations fill. Raises CheckpointError if a file ends early
    (it was cut after its header was read).
    """
    queue = deque(sorted(reads, key=lambda read: (read.file, read.offset)))
    with ExitStack() as stack:
        files = {path: stack.enter_context(path.open("rb", buffering=0)) for path in {read.file for read in queue}}
        descriptors = {path: file.fileno() for path, file in files.items()}
        workers = min(_WORKERS, len(queue))
        if workers <= 1:
            return _Worker(descriptors, advance).drain(queue)
        with ThreadPoolExecutor(workers) as pool:
            return sum(pool.map(lambda _: _Worker(descriptors, advance).drain(queue), range(workers)))


class _Worker:
    """One thread's share of the reads, with its own staging buffer."""

    def __init__(self, descriptors: dict[Path, int], advance: Callable[[int], None]) -> None:
        self._descriptors = descriptors
        self._advance = advance
        self._staging: torch.Tensor | None = None
        self._bytes_read = 0

    def drain(self, queue: deque[Read]) -> int:
        """Perform reads of the shared `queue` until it is empty; returns the bytes read."""
        while True:
            try:
                read = queue.popleft()
            except IndexError:
                return self._bytes_read
            try:
                self._perform(read)
            except BaseException:
                queue.clear()  # the other threads stop too
                raise

    def _perform(self, read: Read) -> None:
        view = read.destination
        if _fills_directly(read):
            memory = _memory(view)
            for start in range(0, len(memory), _CALL_BYTES):
                call = memory[start : start + _CALL_BYTES]
                self._pread(read.file, call, read.offset + start)
                self._advance(len(call))
            return
        for piece in _pieces(read):
            piece.destination.copy_(self._stage(piece))
            self._advance(piece.nbytes)

    def _stage(self, read: Read) -> torch.Tensor:
        """The elements of `read` in the staging buffer, shaped as its destination."""
        if self._staging is None:
            self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, device="cpu")
        memory = _memory(self._staging)
        run, outer = read.run()
        if not _skips_gaps(run, outer):
            span = _span(read)
            self._pread(read.file, memory[:span], read.offset)
            strides: Sequence[int] = read.strides
        else:
            span = read.nbytes
            steps = [range(0, stride * size, stride) for stride, size, _ in reversed(outer)]
            for index, step in enumerate(itertools.product(*steps)):
                self._pread(read.file, memory[index * run : (index + 1) * run], read.offset + sum(step))
            strides = _packed_strides(read)
        itemsize = read.dtype.itemsize
        elements = self._staging[:span].view(read.dtype)
        return elements.as_strided(read.destination.shape, [stride // itemsize for stride in strides])

    def _pread(self, path: Path, memory: memoryview, offset: int) -> None:
        filled = 0
        while filled < len(memory):
            count = os.preadv(self._descriptors[path], [memory[filled:]], offset + filled)
            if count == 0:
                raise CheckpointError(f"{path} ends at byte {offset + filled}: it was truncated while being read")
            filled += count
        self._bytes_read += filled


def _fills_directly(read: Read) -> bool:
    """Whether the file's bytes are the destination's bytes: one run, same dtype, contiguous host memory."""
    view = read.destination
    if view.device.type != "cpu" or view.dtype != read.dtype or not view.is_contiguous():
        return False
    return read.run()[0] == read.nbytes and _is_row_major(read)


def _is_row_major(read: Read) -> bool:
    dims = [dim for _, _, dim in reversed(read.dims())]
    return dims == sorted(dims)


def _memory(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _skips_gaps(run: int, outer: Sequence[tuple[int, int, int]]) -> bool:
    return bool(outer) and outer[0][0] - run > MAX_GAP_BYTES


def _span(read: Read) -> int:
    """Bytes of the file from the first to the last element."""
    return read.dtype.itemsize + sum(stride * (size - 1) for stride, size, _ in read.dims())


def _packed_strides(read: Read) -> list[int]:
    """Strides in bytes after the runs are put side by side, in the order of the file."""
    strides, step = [0] * len(read.strides), read.dtype.itemsize
    for _, size, dim in read.dims():
        strides[dim] = step
        step *= size
    return strides


def _pieces(read: Read) -> Iterator[Read]:
    """Split `read` until a piece fits the staging buffer and has no wide gap that would be read in vain."""
    run, outer = read.run()
    skips = _skips_gaps(run, outer)
    wide, inner = [], run
    for stride, size, dim in outer:
        if stride - inner > MAX_GAP_BYTES:
            wide.append((size, dim))
        inner += stride * (size - 1)
    if wide and not skips:
        size, dim = wide[-1]
        for index in range(size):
            yield from _pieces(read.part(dim, index, 1))
    elif (read.nbytes if skips else inner) <= STAGING_BYTES:
        yield read
    else:
        _, size, dim = read.dims()[-1]
        yield from _pieces(read.part(dim, 0, size // 2))
        yield from _pieces(read.part(dim, size // 2, size - size // 2))
