"""Lanes of protocol.py on a GPU: the stream of the model, and two beside it that need no multiprocessor.

A kernel beside a matrix product starts when the product ends, as a product holds all multiprocessors. Copies from or to
another GPU go through the copy engines, and flags are operations of the streams (cuStreamWriteValue32 and
cuStreamWaitValue32): neither waits. Copies within a GPU and sums are kernels, and so run in the model's stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ndcompile.copy_engines.protocol import FETCH, HERE, SEND, Copy
from ndcompile.copy_engines.sums import add_rows
from ndcompile.private.cuda import copy_bytes, wait_for_value, write_value


class StreamLanes:
    """See `protocol.Lanes`. HERE is the stream that is current when it is given something."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = {lane: torch.cuda.Stream(device, priority=-1) for lane in (FETCH, SEND)}

    def _stream(self, lane: str) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if lane == HERE else self.streams[lane]

    def copy(self, lane: str, copies: Sequence[Copy]) -> None:
        stream = self._stream(lane).cuda_stream
        for to, source, size in copies:
            copy_bytes(stream, to, source, size)

    def tell(self, lane: str, flags: Sequence[int], value: int) -> None:
        stream = self._stream(lane).cuda_stream
        for flag in flags:
            write_value(stream, flag, value)

    def hear(self, lane: str, flags: Sequence[int], value: int) -> None:
        stream = self._stream(lane).cuda_stream
        for flag in flags:
            wait_for_value(stream, flag, value)

    def add(self, lane: str, result: Tensor, own: Tensor, others: Tensor, rank: int, mean: bool) -> None:
        assert lane == HERE
        add_rows(result, own, others, rank, mean)

    def mark(self, lane: str) -> torch.cuda.Event:
        return self._stream(lane).record_event()

    def behind(self, lane: str, mark: torch.cuda.Event) -> None:
        self._stream(lane).wait_event(mark)
