"""Long work of all ranks, outside the graph, that ends on all when it fails or dies on one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from ndcompile.errors import AgreementError
from ndcompile.verify.agreement import Agreement

SILENCE = timedelta(seconds=30)
"""How long a rank that began may be silent. It reports every few seconds while it works: then it is dead."""
_LONGEST_PAUSE = 2.0
_OWN_WORDS = 5.0
"""Seconds that a rank has, after another one failed, to find the same fault."""

T = TypeVar("T")
Work = Callable[[Callable[[], bool]], T]
"""What a rank does; it may ask its argument whether to stop."""


def together(agreement: Agreement, name: str, work: Work[T]) -> T:
    """Do `work` in a thread, while this one tells the other ranks that it is alive; return when all are done.

    A rank that fails, or is silent for `SILENCE`, ends the work of all: AgreementError on the others. All begin at the
    same time. `work` may have exchanges of its own.
    """
    limit = min(SILENCE, agreement.timeout)
    stop = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="ndcompile") as pool:
        future = pool.submit(work, stop.is_set)
        try:
            pause = 0.002
            for number in itertools.count():
                wait([future], timeout=pause)
                if done := future.done():
                    future.result()
                if all(agreement.exchange(f"{name}/{number}", done, limit)):
                    return future.result()
                pause = min(2 * pause, _LONGEST_PAUSE)
        except AgreementError:
            # A fault that all ranks find is told by each in its own words.
            wait([future], timeout=_OWN_WORDS)
            if future.done():
                future.result()
            raise
        finally:
            stop.set()
    raise AssertionError("unreachable")


@contextmanager
def patience(agreement: Agreement, limit: timedelta = SILENCE) -> Iterator[None]:
    """While active, ranks wait no longer than `limit` for each other."""
    before = agreement.timeout
    agreement.timeout = min(before, limit)
    try:
        yield
    finally:
        agreement.timeout = before
