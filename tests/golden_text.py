"""Golden texts about plans, in golden/plan. `UPDATE_GOLDEN=1 pytest TEST` writes them anew; read the difference."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden" / "plan"
TORCH = "2.13"

golden_torch = pytest.mark.skipif(
    not torch.__version__.startswith(TORCH), reason=f"golden files are of torch {TORCH}, whose graphs they count"
)


def same(text: str, name: str) -> None:
    """Compare with a golden file; UPDATE_GOLDEN=1 writes it anew."""
    golden = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    lines = (golden.read_text().splitlines(), text.splitlines())
    assert text == golden.read_text(), "\n".join(difflib.unified_diff(*lines, n=1, lineterm=""))
