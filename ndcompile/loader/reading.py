"""Read plan and its execution: strided bytes of files into views of local tensors, with preadv.

Never a memory map: a mapped file that is rewritten changes the loaded model, and one that is truncated kills the
process. No collectives: a rank reads what it holds and nothing can hang.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ndcompile.loader.catalog import CheckpointError
from ndcompile.loader.headers import Stamp
from ndcompile.loader.pieces import Piece, crop
from ndcompile.parameters.layout import narrow

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
    """Elements of `dtype` at byte `offset` of `file`, `strides` bytes apart per dim of `destination`.

    `stamp` is the file's when the read was planned.
    """

    file: Path
    offset: int
    strides: tuple[int, ...]
    dtype: torch.dtype
    destination: torch.Tensor
    stamp: Stamp

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


def plan_reads(pieces: Iterable[Piece], rectangles: Iterable[tuple[tuple[int, ...], torch.Tensor]]) -> list[Read]:
    """Reads that fill `rectangles`, (global offset, destination view) pairs, from the `pieces` of a global tensor."""
    reads = []
    for start, view in rectangles:
        for piece in crop(pieces, start, view.shape):
            itemsize = piece.block.dtype.itemsize
            destination = view if piece.size == view.shape else narrow(view, piece.start, piece.size)
            strides = tuple(stride * itemsize for stride in piece.strides)
            block = piece.block
            offset = block.offset + piece.offset * itemsize
            reads.append(Read(block.file, offset, strides, block.dtype, destination, block.stamp))
    return reads


def planned_bytes(read: Read) -> int:
    """Bytes that `execute` reads for `read`: more than it needs where near runs are read with the gap between them."""
    if read.run()[0] == read.nbytes:
        return read.nbytes
    return sum(piece.nbytes if _skips_gaps(*piece.run()) else _span(piece) for piece in _pieces(read))


def execute(reads: Iterable[Read], advance: Callable[[int], None] = lambda nbytes: None) -> int:
    """Perform `reads`, sorted by file and offset; returns the bytes read, gaps between near runs included.

    `advance(nbytes)` is called from worker threads as destinations fill. Raises CheckpointError if a file is gone, ends
    early, or is not the one whose header was read: then the destinations hold parts of two files and are of no use.
    """
    queue = deque(sorted(reads, key=lambda read: (read.file, read.offset)))
    stamps = {read.file: read.stamp for read in queue}
    with ExitStack() as stack:
        descriptors = {path: _open(path, stamp, stack) for path, stamp in stamps.items()}
        workers = min(_WORKERS, len(queue))
        if workers <= 1:
            bytes_read = _Worker(descriptors, advance).drain(queue)
        else:
            with ThreadPoolExecutor(workers) as pool:
                bytes_read = sum(pool.map(lambda _: _Worker(descriptors, advance).drain(queue), range(workers)))
        for path, stamp in stamps.items():
            _check_unchanged(path, stamp, descriptors[path])
    return bytes_read


def _open(path: Path, stamp: Stamp, stack: ExitStack) -> int:
    try:
        descriptor = stack.enter_context(path.open("rb", buffering=0)).fileno()
    except OSError as error:
        raise CheckpointError(
            f"{path} was there when its header was read, now it cannot be opened: {error.strerror}. Load again when "
            "nothing moves the checkpoint."
        ) from error
    _check_unchanged(path, stamp, descriptor)
    return descriptor


def _check_unchanged(path: Path, stamp: Stamp, descriptor: int) -> None:
    found = Stamp.of(os.fstat(descriptor))
    if found != stamp:
        raise CheckpointError(
            f"{path} was changed while it was being loaded: expected inode {stamp.inode}, {stamp.size} bytes, modified "
            f"at {stamp.modified_ns} ns; found {found.inode}, {found.size}, {found.modified_ns}. The weights would be "
            "parts of two files: load again when nothing writes to the checkpoint."
        )


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
    # Not reshape(-1): a lone element may have any stride and still count as contiguous.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


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
