"""Rules of a tp_plan that transformers does not know: styles of ours, and counts.

Code of models says `view(batch, length, self.num_heads, head_dim)` or `split(self.split_size)`: it reads an integer
that counts what tp cuts. A rule `{"layers.*.attn.num_heads": "local_count"}` lets the copy of the model that is traced
see a rank's share of it. Whether that is right is for the proof to say: the code without tp sees the whole number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from ndcompile.errors import PlanError
from ndcompile.plans.styles import LOCAL_COUNT, OWN_STYLES


def split_rules(plan: Any) -> tuple[Any, dict[str, str]]:
    """The part of a config's tp_plan that transformers can resolve, and the rules that it cannot: with styles of ours,
    and for modules of one number, such as the second linear of an nn.Sequential. Counts are in neither. What is no
    dictionary is left as it is."""
    if not isinstance(plan, dict):
        return plan, {}
    rules = {name: style for name, style in plan.items() if style != LOCAL_COUNT}
    own = {n: style for n, style in rules.items() if style in OWN_STYLES or re.search(r"(^|\.)\d+(\.|$)", n)}
    return {name: style for name, style in rules.items() if name not in own}, own


def matches(rule: str, name: str) -> bool:
    """Whether a rule names a module, parameter or attribute: `*` stands for a number."""
    parts, given = rule.split("."), name.split(".")
    return len(parts) == len(given) and all(
        part == other or (part == "*" and other.isdigit()) for part, other in zip(parts, given, strict=True)
    )


def local_counts(model: nn.Module, plan: Any, tp: int) -> tuple[str, ...]:
    """FQNs of the attributes that the rules of a tp_plan name with the style "local_count".

    Raises PlanError for a rule that names no integer attribute, and for a number that tp does not divide.
    """
    rules = [n for n, style in plan.items() if style == LOCAL_COUNT] if isinstance(plan, Mapping) and tp > 1 else []
    found: dict[str, list[str]] = {rule: [] for rule in rules}
    for fqn, module in model.named_modules() if rules else ():
        for attribute, value in vars(module).items():
            name = f"{fqn}.{attribute}".lstrip(".")
            for rule in [rule for rule in found if matches(rule, name)]:
                if type(value) is not int or value % tp:
                    raise PlanError(f"{name!r} is {value!r}, of which tp={tp} ranks have no equal whole share.")
                found[rule].append(name)
    if unmatched := [rule for rule, names in found.items() if not names]:
        raise PlanError(f"tp_plan keys {unmatched} name no attribute of a module of {type(model).__name__}.")
    return tuple(name for names in found.values() for name in names)
