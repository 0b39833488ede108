"""Progress of a long transfer on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextlib.contextmanager
def transfer_progress(description: str, total_bytes: int, *, enabled: bool) -> Iterator[Callable[[int], None]]:
    """A bar with bytes and bytes per second on stderr; yields `advance(nbytes)`, which any thread may call.

    Quiet unless `enabled` and stderr is a terminal.
    """
    if not (enabled and sys.stderr.isatty()):
        yield lambda nbytes: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=total_bytes)
        yield lambda nbytes: progress.advance(task, nbytes)
