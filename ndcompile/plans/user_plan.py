"""Plans of an ordinary nn.Module: no transformers class stands behind it, so the user's rules are all there is."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn
from transformers.distributed import DistributedConfig

from ndcompile.errors import PlanError
from ndcompile.plans.own_rules import matches, split_rules
from ndcompile.plans.styles import STYLES

FSDP_STYLES = ("free_full_weight", "keep_full_weight")


def resolve_user_plan(
    model: nn.Module, sizes: Mapping[str, int], config: DistributedConfig
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """The rules of `config.tp_plan` and `config.fsdp_plan` for `model`: TP, EP and FSDP styles by FQN.

    A rule names a module or a parameter, with `*` for the number of a layer; a module's rule serves its own parameters
    too, as in transformers. Without an fsdp_plan the layers of every ModuleList are gathered again in backward.

    Raises PlanError for tp without a tp_plan, ep, unknown styles, and rules that match nothing.
    """
    name = type(model).__name__
    if sizes["ep"] > 1:
        raise PlanError(
            f"ep={sizes['ep']}, but {name} is no transformers model: how its experts get tokens is unknown."
        )
    given, own = split_rules(config.tp_plan)
    tp_rules = {**given, **own} if isinstance(given, dict) else {}
    if sizes["tp"] > 1 and not tp_rules:
        raise PlanError(
            f"tp={sizes['tp']}, but {name} is no transformers model and has no plan. Pass one: "
            "DistributedConfig(tp_plan={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'})."
        )
    tp_styles = expand_rules(model, tp_rules, "tp_plan", STYLES) if sizes["tp"] > 1 else {}
    rules = config.fsdp_plan if isinstance(config.fsdp_plan, dict) else _layers(model)
    modules = {fqn for fqn, _ in model.named_modules()}
    fsdp_styles = expand_rules(model, rules, "fsdp_plan", FSDP_STYLES)
    return tp_styles, {}, {fqn: style for fqn, style in fsdp_styles.items() if fqn in modules}


def expand_rules(model: nn.Module, rules: Mapping[str, str], plan: str, known: Collection[str]) -> dict[str, str]:
    """FQN of every module and parameter that a rule names -> style.

    Raises PlanError for styles that are not `known`, and rules that match nothing.
    """
    if unknown := set(rules.values()) - set(known):
        raise PlanError(f"{plan} names unknown styles {sorted(unknown)}. Known styles: {sorted(known)}.")
    styles: dict[str, str] = {}
    matched: set[str] = set()
    ordered = sorted(rules, key=lambda rule: rule.count("*"))  # what names one module goes before what names all
    for fqn, module in model.named_modules():
        own = [f"{fqn}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False)]
        for name in (fqn, *own):
            for rule in [rule for target in (name, fqn) for rule in ordered if matches(rule, target)]:
                matched.add(rule)
                styles.setdefault(name, rules[rule])
    if unmatched := sorted(set(rules) - matched):
        raise PlanError(f"{plan} keys {unmatched} match no module or parameter of {type(model).__name__}.")
    return styles


def _layers(model: nn.Module) -> dict[str, str]:
    """Every child of a ModuleList."""
    return {
        f"{fqn}.{number}".lstrip("."): "free_full_weight"
        for fqn, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for number in range(len(module))
    }
