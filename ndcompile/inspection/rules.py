"""Which rule placed a parameter: a key of the model's plan, an override of `distributed_config`, or none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from ndcompile.plans.own_rules import matches
from ndcompile.plans.sharding_plan import ParameterPlan, Repair
from ndcompile.verify.fused_parameters import rule_of


@dataclass(frozen=True)
class Rules:
    """The plans of a model (tp_plan, ep_plan, fsdp_plan), what a config overrides in each, and what was repaired."""

    plans: Mapping[str, Mapping[str, str]]
    overrides: Mapping[str, Mapping[str, str]]
    tp: int
    repairs: tuple[Repair, ...] = ()

    def placed(self, entry: ParameterPlan) -> str:
        """The rule that gave a parameter its placement on tp, or on ep."""
        if entry.expert:
            return self._find("ep_plan", entry.fqn, "grouped_gemm") or "default: whole"
        if self.tp == 1:
            return "default: whole, as tp = 1"
        names = (entry.fqn, *entry.aliases)
        for repair in self.repairs:
            if any(matches(repair.rule, rule_of(name)) for name in names):
                return f"repaired: {repair}"
        found = (self._find(plan, name, entry.style) for name in names for plan in ("tp_plan", "ep_plan"))
        return next(filter(None, found), "default: replicated over tp")

    def gathered(self, entry: ParameterPlan) -> str:
        """The rule that says whether a parameter's gathered weight is kept for backward."""
        found = (self._find("fsdp_plan", name, entry.fsdp_style) for name in (entry.fqn, *entry.aliases))
        return next(filter(None, found), f"default: {entry.fsdp_style}")

    def _find(self, plan: str, fqn: str, style: str) -> str:
        """The rule of the innermost module around `fqn` that `plan` names with this style."""
        parts = fqn.split(".")
        given = [(f"distributed_config.{plan}", self.overrides[plan]), (plan, self.plans[plan])]
        for end in range(len(parts), 0, -1):
            name = ".".join(parts[:end])
            for title, rules in given:
                for key, value in rules.items():
                    if value == style and matches(key, name):
                        return f"{title}[{key!r}] = {style}"
        return ""


def rules_of(model: PreTrainedModel, config: DistributedConfig, repairs: tuple[Repair, ...] = ()) -> Rules:
    """The rules for a model; it must not have been planned itself, as transformers writes overrides into its plans."""
    names = ("tp_plan", "ep_plan", "fsdp_plan")
    given = {name: getattr(config, name) for name in names}
    return Rules(
        {name: dict(getattr(model, name) or {}) for name in names},
        {name: value if isinstance(value, dict) else {} for name, value in given.items()},
        config.tp_size or 1,
        repairs,
    )


def generic(name: str) -> str:
    """`name` with `*` for the numbers of layers, as plans spell it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
