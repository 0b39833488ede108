"""The process group that compiled graphs gather weights and reduce gradients with, beside the one of NCCL.

A graph names it in its functional collectives, which torch starts and waits for like those of any other group: who
frees and reuses memory sees nothing new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ndcompile.copy_engines.protocol import Exchanges
from ndcompile.errors import UnsupportedError
from ndcompile.private.distributed import Work

OPERATIONS = {dist.ReduceOp.SUM: False, dist.ReduceOp.AVG: True}
"""Reductions -> whether they are a mean."""


class Started(Work):
    """What is under way, with the tensors that it reads and writes. finish: what ends it, in the current stream."""

    def __init__(self, finish: Callable[[], object], tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.finish, self.tensors = finish, tensors

    def wait(self, timeout: object = None) -> bool:
        """Let the current stream wait, not the host."""
        self.finish()
        self.release()
        return True

    def release(self) -> None:
        self.tensors = ()


class CopyGroup(dist.ProcessGroup):
    """Has the two collectives that weights and gradients need, of several tensors each.

    alias: its name in graphs. watch: is told of all that is waited for, see watch.py.
    """

    def __init__(self, alias: str, exchanges: Exchanges, watch: Callable[..., None]) -> None:
        super().__init__(exchanges.rank, exchanges.layout.ranks)  # type: ignore[call-arg]
        self.alias, self.exchanges, self.watch = alias, exchanges, watch

    def getBackendName(self) -> str:
        return "copies"

    def allgather_into_tensor_coalesced(
        self, results: list[Tensor], shards: list[Tensor], options: object = None
    ) -> Started:
        _check(results, shards)
        with self._whole():
            end = self.exchanges.gather(results, shards)
            started = Started(partial(self.exchanges.gathered, *end), [*results, *shards])
            self.watch(f"gather {self.exchanges.gathers}", end[-1], started.release)
        return started

    def reduce_scatter_tensor_coalesced(
        self, results: list[Tensor], gradients: list[Tensor], options: dist.ReduceScatterOptions | None = None
    ) -> Started:
        _check(gradients, results)
        operation = dist.ReduceOp.SUM if options is None else options.reduceOp
        mean = next((mean for known, mean in OPERATIONS.items() if operation == known), None)
        if mean is None:
            raise UnsupportedError(f"Copy engines reduce by sum or mean, not by {operation}.")
        with self._whole():
            number, sent = self.exchanges.reduce(results, gradients, mean)
            started = Started(partial(self._reduced, number, sent), [*results, *gradients])
            self.watch(f"reduction {number}", sent, started.release)
        return started

    def _reduced(self, number: int, sent: Any) -> None:
        with self._whole():
            self.exchanges.reduced(number, sent)
            self.watch(f"reduction {number}", self.exchanges.added)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """An error in between leaves flags untold, so this rank can never go on with the others."""
        try:
            yield
        except BaseException:
            self.exchanges.broken = True
            raise


def _check(whole: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
    for tensor in (*whole, *shards):
        if not tensor.is_contiguous():
            raise UnsupportedError(f"Copy engines move contiguous tensors, not one with strides {tensor.stride()}.")
    assert all(a.dtype is b.dtype and a.numel() % max(b.numel(), 1) == 0 for a, b in zip(whole, shards, strict=True))
