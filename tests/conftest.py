"""What tests leave is collected at once, and what stays (modules, caches of torch) is not looked at again."""

from __future__ import annotations

import gc


def pytest_runtest_teardown() -> None:
    """Collections would look at millions of objects that stay, a seventh of the time of tests that trace."""
    gc.collect()
    gc.freeze()
