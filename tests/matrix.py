"""Cells of a test matrix: `make test` runs a covering sample of them, `make parity` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], *kept: int) -> list[Any]:
    """Values of one argument; all but those at the indices `kept` are marked slow."""
    return sampled_rows([(value,) for value in values], *kept)


def sampled_rows(rows: Iterable[tuple[Any, ...]], *kept: int) -> list[Any]:
    """The same for values of several arguments."""
    params = [pytest.param(*row, marks=[] if i in kept else pytest.mark.slow) for i, row in enumerate(rows)]
    assert max(kept) < len(params)
    return params
