"""Private symbols of torch.cuda, and calls of CUDA's driver that torch has no word for, as torch's own bindings make
them (the package cuda-bindings, which torch's releases for CUDA install). Tried with CUDA 13.0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.cuda import _sleep

try:
    from cuda.bindings import driver
except ImportError:  # a torch without CUDA
    driver = None

CYCLES = 3e9
"""A second, at a clock that no GPU of today exceeds."""


def keep_busy(seconds: float) -> None:
    """Launch a kernel that runs for at least `seconds` on the current stream, and computes nothing."""
    _sleep(int(seconds * CYCLES))


def why_no_copies() -> str | None:
    """What is missing here for the functions below; None if nothing is."""
    if driver is None:
        return "the package cuda-bindings is missing (pip install cuda-bindings, of torch's version of CUDA)"
    return None


def copy_bytes(stream: int, to: int, source: int, size: int) -> None:
    """Copy within a GPU, which is a kernel, or from or to another one, which a copy engine does beside kernels."""
    _check(driver.cuMemcpyAsync(to, source, size, stream))


def write_value(stream: int, address: int, value: int) -> None:
    """Write an int32 when the stream comes to it, and what it did before can be seen by all GPUs."""
    _check(driver.cuStreamWriteValue32(stream, address, value & 0xFFFFFFFF, 0))


def wait_for_value(stream: int, address: int, value: int) -> None:
    """Let a stream wait until an int32 is at least `value`, by a comparison that goes on past its end."""
    at_least = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
    _check(driver.cuStreamWaitValue32(stream, address, value & 0xFFFFFFFF, at_least))


def _check(results: Sequence[Any]) -> None:
    if int(results[0]):
        raise RuntimeError(f"CUDA's driver refused a copy or a flag between GPUs: {results[0]!r}")
