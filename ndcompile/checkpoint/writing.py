"""Write plan and its execution: views of local tensors -> strided bytes of files, with pwrite."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ndcompile.loader.catalog import CheckpointError
from ndcompile.loader.pieces import row_major

STAGING_BYTES = 8 << 20
"""At most as much is copied before it is written: from another device, or to make it contiguous."""

_CALL_BYTES = 64 << 20
"""At most as much in one call, so that progress moves and a rank can be stopped."""


@dataclass(frozen=True, eq=False)
class Write:
    """Elements of `source` at byte `offset` of `file`, `strides` bytes apart per dim."""

    file: Path
    offset: int
    strides: tuple[int, ...]
    source: Tensor

    @property
    def nbytes(self) -> int:
        return self.source.numel() * self.source.dtype.itemsize


def plan_write(file: Path, offset: int, shape: Sequence[int], start: Sequence[int], source: Tensor) -> Write:
    """The write of `source` at `start` of the row-major tensor of `shape` which begins at byte `offset` of `file`."""
    strides = tuple(source.dtype.itemsize * stride for stride in row_major(shape))
    return Write(file, offset + sum(map(int.__mul__, start, strides)), strides, source.detach())


def execute(writes: Iterable[Write], advance: Callable[[int], None], stopped: Callable[[], bool]) -> int:
    """Perform `writes`, sorted by file and offset, and make them durable; returns the bytes written.

    stopped: asked between calls; once it is true, nothing more is written.

    Raises CheckpointError with file, byte and size when the file system refuses.
    """
    total = 0
    queue = sorted(writes, key=lambda write: (write.file, write.offset))
    for path, group in itertools.groupby(queue, key=lambda write: write.file):
        with ExitStack() as stack:
            descriptor = os.open(path, os.O_WRONLY)
            stack.callback(os.close, descriptor)
            for write in group:
                for offset, memory in _runs(write):
                    if stopped():
                        return total
                    _pwrite(path, descriptor, memory, offset)
                    total += len(memory)
                    advance(len(memory))
            try:
                # A full disk or quota may show only now, and what is renamed must be there after a power failure.
                os.fsync(descriptor)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be made durable: {error.strerror}") from error
    return total


def _runs(write: Write) -> Iterator[tuple[int, memoryview]]:
    """(byte of the file, contiguous bytes) that make up `write`."""
    for offset, part in _parts(write.offset, write.strides, write.source):
        if not part.numel():
            continue
        packed = part.cpu().contiguous()
        # Not reshape(-1): a lone element may have any stride and still count as contiguous.
        memory = packed.as_strided((packed.numel(),), (1,)).view(torch.uint8).numpy().data
        run, outer = _run(packed.shape, write.strides, packed.dtype.itemsize)
        steps = [range(0, stride * size, stride) for stride, size in outer]
        for number, shifts in enumerate(itertools.product(*steps)):
            for start in range(number * run, (number + 1) * run, _CALL_BYTES):
                end = min(start + _CALL_BYTES, (number + 1) * run)
                yield offset + sum(shifts) + start - number * run, memory[start:end]


def _run(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of one run in the file, and (stride, size) of the dims over which runs repeat, outermost first."""
    run = itemsize
    for dim in reversed(range(len(shape))):
        if shape[dim] == 1:
            continue
        if strides[dim] != run:
            return run, [(strides[d], shape[d]) for d in range(dim + 1)]
        run *= shape[dim]
    return run, []


def _parts(offset: int, strides: Sequence[int], source: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Cut `source` along its outer dims until a part needs no more than the staging bytes to copy."""
    if source.device.type == "cpu" and source.is_contiguous():
        yield offset, source
        return
    if source.numel() * source.dtype.itemsize <= STAGING_BYTES or not source.ndim:
        yield offset, source
        return
    dim = next((dim for dim, size in enumerate(source.shape) if size > 1), 0)
    inner = math.prod(source.shape[dim + 1 :]) * source.dtype.itemsize
    rows = max(STAGING_BYTES // max(inner, 1), 1)
    for start in range(0, source.shape[dim], rows):
        part = source.narrow(dim, start, min(rows, source.shape[dim] - start))
        if inner > STAGING_BYTES:
            yield from _parts(offset + start * strides[dim], strides, part)
        else:
            yield offset + start * strides[dim], part


def _pwrite(path: Path, descriptor: int, memory: memoryview, offset: int) -> None:
    written = 0
    try:
        while written < len(memory):
            written += os.pwrite(descriptor, memory[written:], offset + written)
    except OSError as error:
        raise CheckpointError(
            f"{path}: {len(memory) - written} bytes at byte {offset + written} cannot be written: {error.strerror}"
        ) from error
