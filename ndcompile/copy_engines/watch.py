"""A time-out for copies that wait for a rank: a stream that waits for a flag would wait for ever, and say nothing.

As the watchdog of NCCL does, it ends the process, as nothing can take a stream back that waits.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

PERIOD = 1.0
"""Seconds between looks."""

_logger = logging.getLogger("ndcompile.copy_engines")


class Watch:
    """Call it with what was started, the event of its end, and what to do then; a thread looks after them.

    name: of the group. limit: how long a collective may take, from its start on the host.
    """

    def __init__(
        self, name: str, device: torch.device, limit: timedelta, give_up: Callable[[], object] = os.abort
    ) -> None:
        self.name, self.device, self.limit, self.give_up = name, device, limit, give_up
        self.pending: deque[tuple[str, Any, Callable[[], object], float]] = deque()
        self.thread: threading.Thread | None = None
        self.ended = threading.Event()

    def __call__(self, what: str, end: Any, ended: Callable[[], object] = lambda: None) -> None:
        self.pending.append((what, end, ended, time.monotonic()))
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name="ndcompile copy engines", daemon=True)
            self.thread.start()
            atexit.register(self.end)

    def look(self) -> None:
        """Forget what has ended; give up if the first that has not is too old."""
        while self.pending:
            what, end, ended, began = self.pending[0]
            if not end.query():
                if time.monotonic() - began > self.limit.total_seconds():
                    _logger.critical(
                        "Copy engines: %s of group %r has waited for another rank for %s. A rank stopped, or is slow "
                        "(look at its log). This process ends, as it cannot take the wait back. A longer time-out: "
                        "torch.distributed.init_process_group(timeout=...).",
                        what,
                        self.name,
                        self.limit,
                    )
                    self.give_up()
                return
            ended()  # also for what nobody waits for, after an error
            self.pending.popleft()

    def end(self) -> None:
        """Stop looking: a thread that Python ends inside of a call of CUDA aborts the process."""
        self.ended.set()
        atexit.unregister(self.end)
        if self.thread is not None:
            self.thread.join()

    def _run(self) -> None:
        torch.get_device_module(self.device).set_device(self.device)  # or it would open the first GPU too
        while not self.ended.wait(PERIOD):
            self.look()
