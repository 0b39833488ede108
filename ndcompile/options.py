"""How a model is compiled: what `ndcompile.compile` is asked for beside model, mesh, plans and checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ndcompile.byte_sizes import parse_bytes
from ndcompile.lowering.lower import BACKENDS
from ndcompile.pipeline import passes_of
from ndcompile.proof.check import check_mode


@dataclass(frozen=True)
class Options:
    """See the arguments of `ndcompile.compile` with these names. disabled: passes. memory_budget: bytes."""

    backend: str = "inductor"
    dynamic: bool | None = None
    disabled: frozenset[str] = frozenset()
    expert_capacity: float | None = None
    loss_only: bool = False
    verify: str = "error"
    cuda_graphs: bool = False
    memory_budget: int | None = None
    async_tp: bool = False
    copy_engines: bool = False


def checked_options(
    backend: str,
    *,
    disable_passes: Collection[str],
    memory_budget: int | str | None,
    dynamic: bool | None = None,
    expert_capacity: float | None = None,
    loss_only: bool = False,
    verify: str = "error",
    cuda_graphs: bool = False,
    async_tp: bool = False,
    copy_engines: bool = False,
) -> Options:
    """Raises ValueError for what no model can be compiled with."""
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown. Use one of {BACKENDS}.")
    if cuda_graphs and backend != "inductor":
        raise ValueError(f'cuda_graphs=True needs backend="inductor", which records them; it is {backend!r}.')
    if async_tp and backend == "eager":
        raise ValueError('async_tp needs backend "inductor" or "aot_eager": it is a pass on lowered graphs.')
    if async_tp and dynamic is True:
        raise ValueError("async_tp needs sizes that are numbers. Leave out dynamic=True, or pass dynamic=False.")
    if async_tp and cuda_graphs:
        raise ValueError("async_tp and cuda_graphs were not tried together. Leave one of them out.")
    if copy_engines and backend == "eager":
        raise ValueError('copy_engines needs backend "inductor" or "aot_eager": it is a pass on lowered graphs.')
    if copy_engines and cuda_graphs:
        raise ValueError("copy_engines and cuda_graphs were not tried together. Leave one of them out.")
    if copy_engines and "use_copy_engines" in disable_passes:
        raise ValueError("copy_engines=True asks for the pass that disable_passes leaves out. Leave one of them out.")
    budget = None if memory_budget is None else parse_bytes(memory_budget)
    if budget is not None and backend == "eager":
        raise ValueError('memory_budget needs backend "inductor" or "aot_eager": the eager graph recomputes nothing.')
    check_mode(verify)
    passes = passes_of(disable_passes)
    return Options(
        backend, dynamic, passes, expert_capacity, loss_only, verify, cuda_graphs, budget, async_tp, copy_engines
    )
