"""What CPython does while graphs are made, and need not. Tried with 3.11; nothing depends on it but time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

ROOM = 70_000
"""Slots of a frame: 560 kB, for which CPython takes a chunk of 1 MB and leaves the rest to the frames above."""


def making_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """`function` without pauses of Python's collector, and with room for the frames of its calls."""

    @with_room_for_frames
    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with keeping_garbage():
            return function(*args, **kwargs)

    return run


@contextmanager
def keeping_garbage() -> Iterator[None]:
    """Context for compiling, which makes millions of objects that stay: Python's collector looks at them again and
    again for cycles that are none, a seventh of the time for 24 layers. What it would have freed is freed behind it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def with_room_for_frames(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, whose frame takes a large chunk of the interpreter's stack.

    Frames lie in chunks of 16 kB that are unmapped as soon as they are empty (`push_chunk` in CPython's pystate.c). A
    trace calls and returns thousands of times a second at one depth, and where a chunk ends there, every call is two
    system calls and a page fault: 4 to 16% of a trace, by its depth (`bench/frame_room.py`).
    """
    changed: Any = function
    changed.__code__ = changed.__code__.replace(co_stacksize=ROOM)
    return changed
