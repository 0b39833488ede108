"""transformers' own plans of a model, with the overrides of a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from ndcompile.errors import PlanError
from ndcompile.plans.expert_plan import check_expert_styles
from ndcompile.plans.own_rules import split_rules
from ndcompile.plans.styles import EXPERT_STYLES, LOCAL_COUNT, STYLES
from ndcompile.plans.user_plan import expand_rules


def resolve_plans(
    model: PreTrainedModel, sizes: Mapping[str, int], config: DistributedConfig
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """transformers' TP, EP and FSDP plans with the config's overrides: FQN of a module or parameter -> style.

    Raises PlanError for a missing plan, unknown styles, and rules that match nothing.
    """
    name, tp, ep = type(model).__name__, sizes["tp"], sizes["ep"]
    if tp > 1 and not model.tp_plan and config.tp_plan != {} and not isinstance(config.tp_plan, dict):
        raise PlanError(
            f"{name} has no tensor-parallel plan, but tp={tp}. Pass one, DistributedConfig(tp_plan={{'layers.*...': "
            "'colwise', ...}), have one derived, DistributedConfig(tp_plan='derive'), or use fsdp only."
        )
    given, own = split_rules(config.tp_plan)
    if isinstance(given, dict) and (unknown := set(given.values()) - set(STYLES)):
        known = sorted([*STYLES, LOCAL_COUNT])
        raise PlanError(f"tp_plan names unknown styles {sorted(unknown)}. Known styles: {known}.")
    if ep > 1 and not model.ep_plan and not config.ep_plan:
        raise PlanError(
            f"{name} has no expert-parallel plan, but ep={ep}. Legal: ep_size=1, or an ep_plan, "
            "DistributedConfig(ep_plan={'layers.*.mlp.experts': 'ep_dispatch_experts', "
            "'layers.*.mlp.experts.gate_up_proj': 'grouped_gemm', ...})."
        )
    only_own = bool(config.tp_plan) and not given
    if only_own:
        given = None if model.tp_plan else {}
    config = dataclasses.replace(config, enable_expert_parallel=False, tp_plan=given)
    # Set, not replaced: transformers refuses a tp_size without rules, which an empty tp_plan (experts only) asks for.
    config.tp_size = 1 if config.tp_plan == {} else tp
    config.ep_size, config.fsdp_size, config.dp_replicate_size = ep, sizes["fsdp"], sizes["dp_replicate"]
    try:
        tp_styles, ep_styles, fsdp_styles = model._resolve_parallel_plans(config)
    except ValueError as error:
        raise PlanError(f"The plan of {name} cannot be resolved: {error}") from error
    # Some ep plans have rules for dense layers. Their ranks must share a batch: those of tp do.
    tp_styles |= expand_rules(model, own, "tp_plan", STYLES) if tp > 1 else {}
    tp_styles |= {fqn: style for fqn, style in ep_styles.items() if style not in EXPERT_STYLES and tp > 1}
    ep_styles = {fqn: style for fqn, style in ep_styles.items() if style in EXPERT_STYLES}
    if tp > 1 and (config.tp_plan != {} or only_own) and not tp_styles:
        raise PlanError(f"No rule of the tp_plan {model.tp_plan} matches a module or parameter of {name}.")
    if unknown := set(tp_styles.values()) - set(STYLES):
        raise PlanError(f"The tp_plan of {name} names unknown styles {sorted(unknown)}. Known: {sorted(STYLES)}.")
    check_expert_styles(model, ep_styles, ep)
    return tp_styles, ep_styles, fsdp_styles
