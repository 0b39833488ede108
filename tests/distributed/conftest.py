"""Fixtures of the distributed tests: pools of real ranks, and checkpoints of tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from models import build
from pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """The pools that tests have started, by their number of ranks."""
    started: dict[int, Pool] = {}
    yield started
    for pool in started.values():
        pool.stop()


@pytest.fixture(scope="module", autouse=True)
def few_groups(pools: dict[int, Pool]) -> Iterator[None]:
    """Ranks do not live on with the process groups of many files."""
    yield
    for pool in pools.values():
        pool.renew()


@pytest.fixture(scope="session")
def world(pools: dict[int, Pool], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Pool]:
    """`world(n)`: the pool of n ranks, started when first used."""

    def get(size: int) -> Pool:
        if size not in pools:
            pools[size] = Pool(size, tmp_path_factory.mktemp(f"world{size}"))
        return pools[size]

    return get


@pytest.fixture(scope="session")
def ranks(world: Callable[[int], Pool]) -> Pool:
    """The pool of four ranks: `ranks(function, *args)` returns the list of the ranks' results."""
    return world(4)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`checkpoint(name, **overrides)`: folder of the safetensors of `models.build(name, **overrides)`, made once."""
    made: dict[str, str] = {}

    def get(name: str, **overrides: Any) -> str:
        key = f"{name} {sorted(overrides.items())}"
        if key not in made:
            folder: Path = tmp_path_factory.mktemp(name)
            build(name, **overrides).save_pretrained(folder)
            made[key] = str(folder)
        return made[key]

    return get
