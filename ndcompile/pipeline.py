"""The passes in order. Each may be disabled by name, and the graph is verified after each."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import fx

from ndcompile.capture.capture import Captured
from ndcompile.graphs.pass_context import PassContext
from ndcompile.lowering.partition import ON_JOINT_GRAPH
from ndcompile.lowering.publish import publish
from ndcompile.lowering.schedule import SCHEDULING
from ndcompile.passes.checkpoint_layers import checkpoint_layers
from ndcompile.passes.chunk_loss import chunk_loss
from ndcompile.passes.complete_boundaries import complete_boundaries
from ndcompile.passes.fit_memory_budget import fit_memory_budget
from ndcompile.passes.hold_gradients import hold_gradients
from ndcompile.passes.merge_boundaries import merge_boundaries
from ndcompile.passes.offload_parameters import offload_parameters
from ndcompile.passes.reduce_auxiliary_loss import reduce_auxiliary_loss
from ndcompile.passes.reduce_statistics import reduce_statistics
from ndcompile.passes.seed_random_ops import seed_random_ops
from ndcompile.passes.shard_sequence import shard_sequence
from ndcompile.passes.unshard_parameters import unshard_parameters
from ndcompile.proof.check import Prover
from ndcompile.proof.made import run_marked
from ndcompile.proof.prove import Proof
from ndcompile.verify.verifier import FACTS, Check, check_groups, verify

Pass = Callable[[fx.Graph, PassContext], None]

PASSES: tuple[Pass, ...] = (
    reduce_statistics,
    complete_boundaries,
    merge_boundaries,
    shard_sequence,
    reduce_auxiliary_loss,
    chunk_loss,
    seed_random_ops,
    checkpoint_layers,
    unshard_parameters,
    offload_parameters,
    hold_gradients,
    fit_memory_budget,
)

PROVEN_FROM: Pass = complete_boundaries
"""The first pass behind which the graph is proven: statistics are reduced, and missing gradient sums are there."""

REQUIRED = frozenset({"seed_random_ops", "unshard_parameters", "offload_parameters", "hold_gradients"})
"""Passes without which the graph would not compute the model."""


def pass_names() -> list[str]:
    """Names of the passes on the captured graph, in order; later ones are in `partition.ON_JOINT_GRAPH` and
    `schedule.SCHEDULING`."""
    return [p.__name__ for p in PASSES]


def passes_of(names: Collection[str]) -> frozenset[str]:
    """The passes to leave out. Raises ValueError for names that are no passes, or ones that the result depends on."""
    if isinstance(names, str):
        raise ValueError(f"disable_passes takes several names, not one string: ({names!r},).")
    names, known = frozenset(names), [*pass_names(), *ON_JOINT_GRAPH, *SCHEDULING]
    if unknown := names - set(known):
        raise ValueError(f"disable_passes names {sorted(unknown)}, which are no passes. Passes: {known}.")
    if needed := names & REQUIRED:
        raise ValueError(f"Passes {sorted(needed)} cannot be disabled: the graph needs them to be right.")
    return names


def run_passes(
    captured: Captured,
    context: PassContext,
    disabled: Collection[str] = (),
    observe: Callable[[str, fx.GraphModule], None] | None = None,
) -> Proof | None:
    """Run all passes on the captured graph; `observe(name, module)` sees it at the start and after each pass.

    Returns what is proven of it along tp, or None where that was not asked for or is not possible.

    The graph goes to torch's own channels as well, at the start and after each pass, see `publish.py`.
    """
    graph = captured.module.graph
    groups = {axis.group: name for name, axis in context.mesh.axes.items()}
    publish("captured", graph, groups)
    if observe:
        observe("captured", captured.module)
    prover, proven = Prover(graph, context), False
    facts: list[Check] = [check_groups]
    for run in PASSES:
        if run.__name__ not in disabled:
            run_marked(run, graph, context)
            facts += FACTS.get(run.__name__, ())
            publish(run.__name__, graph, groups)
            if observe:
                observe(run.__name__, captured.module)
        proven = proven or run is PROVEN_FROM
        if proven:
            prover.check(graph, after=run.__name__)  # first: it names the node where a fault begins
        verify(graph, context, facts)
    verify(graph, context)
    captured.module.recompile()
    return prover.proof
