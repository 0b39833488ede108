"""Sizes of memory as people write them."""

from __future__ import annotations

import re

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(size: int | str) -> int:
    """Bytes of a number, or of a text with a unit such as 80GiB (2**30) or 80GB (10**9). Raises ValueError."""
    match = re.fullmatch(r"([0-9]+(?:[.][0-9]+)?) *([A-Za-z]*)", str(size).strip())
    if isinstance(size, bool) or match is None or match[2].upper() not in UNITS or not float(match[1]):
        raise ValueError(f"{size!r} is no size of memory: give a number and a unit, such as 80GiB or 80GB")
    return int(float(match[1]) * UNITS[match[2].upper()])
