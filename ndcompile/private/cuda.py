"""Private symbols of torch.cuda."""

from __future__ import annotations

from torch.cuda import _sleep

CYCLES = 3e9
"""A second, at a clock that no GPU of today exceeds."""


def keep_busy(seconds: float) -> None:
    """Launch a kernel that runs for at least `seconds` on the current stream, and computes nothing."""
    _sleep(int(seconds * CYCLES))
