"""Recompute as much of the layers in backward as a budget of saved bytes asks for, the cheapest first.

Before:  n = rms_norm(h, w)                         {module: model.layers.0.input_layernorm}
         q = linear(n, wq)                          {module: model.layers.0.self_attn.q_proj}
         h2 = add(h, d)                             {module: model.layers.0}
After:   n = rms_norm(h, w)                         {..., recompute: MUST_RECOMPUTE}
         q = linear(n, wq)                          {..., recompute: MUST_RECOMPUTE}
         h2 = add(h, d)                             {..., recompute: MUST_SAVE}

A layer is recomputed in stages: element-by-element operators, then matrix products, then attention, then collectives
(`recompute.py`). All layers reach a stage before any goes to the next, in the order of the model: backward frees
what the last layers saved before it recomputes the first ones.

The tags steer the order in which backward gathers weights, so they are the same on all ranks: each rank chooses for its
own sizes, and all take the largest stage that any of them needs.
"""

from __future__ import annotations

from torch import fx

from ndcompile.errors import PlanError
from ndcompile.graphs.pass_context import PassContext
from ndcompile.graphs.recompute import OUTSIDE, Joint, classes, has_gradients, joint_of, tag
from ndcompile.graphs.recompute_choice import Choice
from ndcompile.loader.rank_reads import spell_bytes


def fit_memory_budget(graph: fx.Graph, context: PassContext) -> None:
    """Tag nodes of layers so that what forward saves fits `context.memory_budget`.

    Raises PlanError on every rank where that is not possible on one of them.
    """
    budget = context.memory_budget
    if budget is None or not has_gradients(graph):
        return
    layers = tuple(name for name in context.layers if name not in context.checkpointed)
    found = classes(graph, layers)
    joint = joint_of(graph, context.fake_mode, layers, found, context.disabled)
    if joint is None:
        return
    stages = context.agree_on_recompute(_choose(joint, sorted({kind for _, kind in found.values()} - {0}), budget))
    if (saved := sum(joint.saved_bytes(stages).values())) > budget:
        raise PlanError(
            f"memory_budget={spell_bytes(budget)}: with the recomputing that the ranks agreed on for the first sizes, "
            f"these sizes keep {spell_bytes(saved)}. Let the first batch be the largest one."
        )
    for node, (layer, kind) in found.items():
        tag(node, kind, stages[layer])


def _choose(joint: Joint, kinds: list[int], budget: int) -> Choice:
    """A stage for each layer, so that a rank keeps as little as the budget, or the least that is possible."""
    stages = [0] * len(joint.layers)
    for stage in kinds:
        for layer in range(len(stages)):
            if _estimate(joint, stages) <= budget and sum(joint.saved_bytes(tuple(stages)).values()) <= budget:
                return _choice(joint, stages, budget)
            if _alike(joint, stage)[layer] < _alike(joint, stages[layer])[layer]:
                stages[layer] = stage
    return _choice(joint, stages, budget)


def _alike(joint: Joint, stage: int) -> dict[int, int]:
    """Bytes of each layer where all are at one stage."""
    return joint.saved_bytes((stage,) * len(joint.layers))


def _estimate(joint: Joint, stages: list[int]) -> int:
    """Bytes of a choice without a partition of its own: what a layer saves depends on its own stage alone."""
    layers = sum(_alike(joint, stage)[layer] for layer, stage in enumerate(stages))
    return layers + _alike(joint, max(stages, default=0))[OUTSIDE]


def _choice(joint: Joint, stages: list[int], budget: int) -> Choice:
    saved = joint.saved_bytes(tuple(stages))
    return Choice(tuple(stages), budget, sum(saved.values()), saved[OUTSIDE])
