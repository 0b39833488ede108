"""What a long step is doing, as one line on rank 0's terminal; nothing where stderr is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def stages(show: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function that names the stage under way; a spinner turns beside it until the context ends."""
    console = Console(stderr=True)
    if not show or not console.is_terminal:
        yield lambda stage: None
        return
    with console.status("") as status:
        yield status.update
