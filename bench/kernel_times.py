"""Times of a step's kernels: a table of them, and how much of communication no other kernel hides."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile


def profile(step: Callable[[], Any], path: str) -> dict[str, float]:
    """Write a table of kernels; returns milliseconds of communication in the step, and how many of them no other kernel
    ran."""
    with torch_profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        step()
        torch.cuda.synchronize()
    with open(path, "w") as out:
        out.write(recorded.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=70))
    kernels = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(communicates(event.name), event.time_range.start, event.time_range.end) for event in kernels]
    communication = merged((start, end) for moves, start, end in spans if moves)
    computation = merged((start, end) for moves, start, end in spans if not moves)
    together = length(communication) + length(computation) - length(merged(communication + computation))
    return {
        "communication_ms": round(length(communication) / 1e3, 1),
        "exposed_ms": round((length(communication) - together) / 1e3, 1),
    }


def communicates(name: str) -> bool:
    """Kernels of NCCL, and copies between GPUs."""
    return "nccl" in name.lower() or "PtoP" in name


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of time spans, as spans that do not touch."""
    union: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)
