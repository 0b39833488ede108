"""How the experts of each MoE layer get their tokens: part of the sharding plan."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from ndcompile.errors import PlanError

ALL_TO_ALL, ALL_GATHER, ALL_REDUCE, CAPACITY = "all_to_all", "all_gather", "all_reduce", "capacity"
EXCHANGES = (ALL_TO_ALL, ALL_GATHER, ALL_REDUCE, CAPACITY)


@dataclass(frozen=True)
class ExpertPlan:
    """The experts of one MoE layer.

    fqn: the module. count: experts of the layer; ep: ranks that share them, `local` each. exchange: one of EXCHANGES,
    and the reason for it. capacity: rows that a rank may send to another, in multiples of an even distribution.
    """

    fqn: str
    count: int
    ep: int
    exchange: str
    reason: str
    capacity: float | None = None

    @property
    def local(self) -> int:
        return self.count // self.ep


def check_expert_styles(model: PreTrainedModel, ep_styles: Mapping[str, str], ep: int) -> None:
    """Raises PlanError, with the legal sizes, for an ep that does not divide the experts; and for rules without effect.

    An `ep_dispatch_experts` module must hold the number of its experts and take hidden states, expert indices and
    weights, and its stacked weights must all be sharded.
    """
    if ep == 1:
        return
    modules = {fqn: model.get_submodule(fqn) for fqn, style in ep_styles.items() if style == "ep_dispatch_experts"}
    if not modules:
        raise PlanError(
            f"ep={ep}, but no rule of the ep_plan {model.ep_plan} gives a module of {type(model).__name__} the "
            "style 'ep_dispatch_experts'. Give it to the experts modules, or use ep_size=1."
        )
    for fqn, module in modules.items():
        count = getattr(module, "num_experts", None)
        if not isinstance(count, int) or len(inspect.signature(module.forward).parameters) < 3:
            raise PlanError(
                f"{fqn!r} has the style 'ep_dispatch_experts', but {type(module).__name__} has no num_experts or does "
                "not take hidden states, indices and weights. Leave it out of ep_plan, or use ep_size=1."
            )
        stacked = {f"{fqn}.{name}" for name, p in module.named_parameters(recurse=False) if p.shape[:1] == (count,)}
        if whole := sorted(name for name in stacked if ep_styles.get(name) != "grouped_gemm"):
            raise PlanError(f"The experts of {fqn!r} are exchanged over ep, so {whole} must be 'grouped_gemm' too.")
        if count % ep:
            legal = [n for n in range(2, count + 1) if count % n == 0]
            raise PlanError(f"ep={ep} does not divide the {count} experts of {fqn!r}. Legal ep sizes: {legal}.")
    sharded = {fqn.rpartition(".")[0] for fqn, style in ep_styles.items() if style == "grouped_gemm"}
    if lonely := sorted(sharded - modules.keys()):
        raise PlanError(
            f"Experts of {lonely} are sharded over ep, but no 'ep_dispatch_experts' rule brings them tokens."
        )


def plan_experts(
    model: PreTrainedModel,
    ep_styles: Mapping[str, str],
    sizes: Mapping[str, int],
    implementation: str,
    capacity: float | None,
) -> tuple[ExpertPlan, ...]:
    """One ExpertPlan a MoE layer, in the model's order.

    implementation: `ep_implementation` of the config. capacity: rows that a rank may send to another, as a multiple of
    tokens x top_k / ep; inf is the worst case.

    Raises PlanError for an exchange that the layout cannot have.
    """
    if capacity is not None and implementation == "auto":
        implementation = CAPACITY
    if (implementation == CAPACITY) != (capacity is not None) or (capacity is not None and not capacity > 0):
        raise PlanError(
            "ep_implementation='capacity' and expert_capacity, a number above 0 (math.inf drops nothing), go together; "
            f"given are {implementation!r} and {capacity}."
        )
    if implementation not in (*EXCHANGES, "auto"):
        raise PlanError(f"ep_implementation={implementation!r} is not supported. Use one of {('auto', *EXCHANGES)}.")
    exchange, reason = _choose(_top_k(model), sizes, implementation)
    return tuple(
        ExpertPlan(fqn, module.num_experts, sizes["ep"], exchange, reason, capacity)
        for fqn, module in model.named_modules()
        if ep_styles.get(fqn) == "ep_dispatch_experts"
    )


def _choose(top_k: int | None, sizes: Mapping[str, int], asked: str) -> tuple[str, str]:
    """The exchange and the reason. Masking moves every token once to every rank, all-to-all top_k times to one rank.

    Where batches differ, all-to-all was the faster one even at ep=4 and top_k=8, and kept less (README, "Speed").
    """
    ep, shares_batch = sizes["ep"], sizes["ep"] == sizes["tp"]
    if asked == ALL_REDUCE and ep > 1 and not shares_batch:
        raise PlanError(
            f"ep_implementation='all_reduce' needs a group that shares one batch (ep_size = tp_size), but ep={ep} and "
            f"tp={sizes['tp']}. Use 'all_to_all', or 'all_gather' where all ranks have the same number of tokens."
        )
    if asked != "auto":
        return (ALL_REDUCE if asked == ALL_GATHER and shares_batch else asked), "asked for by ep_implementation"
    if top_k is None:
        return ALL_TO_ALL, "the number of experts a token is unknown"
    if ep > top_k:
        return ALL_TO_ALL, f"a token meets top_k={top_k} of ep={ep} ranks"
    if shares_batch:
        return ALL_REDUCE, f"one batch on all ranks, and ep={ep} <= top_k={top_k}: summing moves less"
    return ALL_TO_ALL, "ranks have batches of their own, which gathering would put on every rank"


def _top_k(model: PreTrainedModel) -> int | None:
    """Experts a token: the name that transformers' configurations share. None for an ordinary nn.Module."""
    if not isinstance(model, PreTrainedModel):
        return None
    value = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    return value if isinstance(value, int) else None
