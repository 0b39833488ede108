"""Private symbols of autograd: the backward that is running."""

from __future__ import annotations

from collections.abc import Callable

import torch


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward that is running, and calls this, has come to its end; not after an error."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def current_backward() -> int | None:
    """A number of the backward that this thread is in."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number
