"""Which layers of a model need to be traced: most are alike, and a trace of one tells the cost of all.

Layers of a stack that repeat a unit are traced as two units, the last of which stands for all but the first. The first
stays apart because what all layers share (masks, parts of rotary embeddings) is computed in it, once. Of checkpointed
layers the last unit stays apart too, and the one before it stands for the others: a layer saves its input for the
next one's, while what follows the last is not checkpointed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ndcompile.plans.sharding_plan import ShardingPlan


@dataclass(frozen=True)
class LayerStack:
    """The stack of layers of a model, as far as it is traced.

    path: FQN of the list of layers, "" for none. counts: index of each traced layer -> how many layers it stands for.
    represents: index of every layer -> index of the traced one that stands for it.
    """

    path: str
    counts: Mapping[int, int]
    represents: Mapping[int, int]

    def index(self, module: str) -> int | None:
        """The layer that a module belongs to; None outside the stack."""
        if not self.path or not module.startswith(self.path + "."):
            return None
        return int(module[len(self.path) + 1 :].partition(".")[0])

    def count(self, module: str) -> int:
        """How many modules of the model `module` stands for, in a trace."""
        index = self.index(module)
        return 1 if index is None else self.counts[index]

    def stretch(self, index: int) -> tuple[int, int]:
        """The first of the neighbours of a traced layer that stand for as many layers, and how many that is."""
        times = self.counts[index]
        while times > 1 and self.counts.get(index - 1) == times:
            index -= 1
        return index, times

    def traced(self, module: str) -> str:
        """The module of the trace that stands for `module`."""
        index = self.index(module)
        if index is None:
            return module
        return re.sub(rf"^({re.escape(self.path)}[.])\d+", rf"\g<1>{self.represents[index]}", module)


def stack_of(model: nn.Module, plan: ShardingPlan, whole: bool = False) -> LayerStack:
    """The stack of `model`, with the layers to trace; `whole` traces all of them."""
    path, layers = _find_stack(model)
    if not path:
        return LayerStack("", {}, {})
    counts, represents = dict.fromkeys(range(len(layers)), 1), {i: i for i in range(len(layers))}
    behind = int(any(getattr(module, "gradient_checkpointing", False) for module in model.modules()))
    for start, period, units in [] if whole else _repeats(layer_kinds(model, path, layers, plan), 0, len(layers)):
        last = start + (units - 1 - behind) * period
        for index in range(start + period, last):
            represents[index] = last + (index - start) % period
            del counts[index]
        counts.update(dict.fromkeys(range(last, last + period), units - 1 - behind))
    return LayerStack(path, counts, represents)


def keep_traced(model: nn.Module, stack: LayerStack) -> None:
    """Remove from `model`, a copy, the layers that are not traced. Those that stay keep their names."""
    if not stack.path:
        return
    layers: Any = model.get_submodule(stack.path)
    number, kept = len(layers), sorted(stack.counts)
    for index in set(range(number)) - set(kept):
        del layers._modules[str(index)]
    for config in _configs(model):
        if vars(config).get("num_hidden_layers") == number:
            vars(config)["num_hidden_layers"] = len(kept)  # set past the validation, which compares it with the lists
        for name, values in _lists(config, number).items():
            vars(config)[name] = [values[index] for index in kept]


def traced_part(plan: ShardingPlan, stack: LayerStack) -> ShardingPlan:
    """`plan` without the layers that are not traced."""

    def stays(fqn: str) -> bool:
        index = stack.index(fqn)
        return index is None or index in stack.counts

    return dataclasses.replace(
        plan,
        parameters=tuple(p for p in plan.parameters if stays(p.fqn)),
        modules=tuple(m for m in plan.modules if stays(m.fqn)),
        experts=tuple(e for e in plan.experts if stays(e.fqn)),
        local_counts=tuple(name for name in plan.local_counts if stays(name)),
    )


def layer_kinds(model: nn.Module, path: str, layers: Sequence[nn.Module], plan: ShardingPlan) -> list[int]:
    """A number for each layer; equal numbers for layers that are the same program on the same placements."""
    described = [_scalars(layer) for layer in layers]
    numbering = _numbering(described)
    settings = [(name, v) for config in _configs(model) for name, v in _lists(config, len(layers)).items()]
    styles = {m.fqn: m.style for m in plan.modules}
    experts = {e.fqn: dataclasses.replace(e, fqn="") for e in plan.experts}
    kinds: dict[object, int] = {}
    numbers = []
    for index, (layer, scalars) in enumerate(zip(layers, described, strict=True)):
        names = [(name, f"{path}.{index}.{name}" if name else f"{path}.{index}") for name, _ in layer.named_modules()]
        key = repr(
            (
                [item for item in scalars.items() if item[0] not in numbering],
                [(name, styles.get(fqn), experts.get(fqn)) for name, fqn in names],
                [c.removeprefix(f"{path}.{index}.") for c in plan.local_counts if c.startswith(f"{path}.{index}.")],
                [_placed(name, p, plan, f"{path}.{index}.{name}") for name, p in layer.named_parameters()],
                [(name, b.shape, b.dtype) for name, b in layer.named_buffers()],
                [(name, values[index]) for name, values in settings],
            )
        )
        numbers.append(kinds.setdefault(key, len(kinds)))
    return numbers


def _placed(name: str, parameter: nn.Parameter, plan: ShardingPlan, fqn: str) -> tuple[object, ...]:
    entry = plan.by_name[fqn]
    placed = (entry.shape, entry.dtype, entry.tp, entry.fsdp, entry.style, entry.fsdp_style, entry.expert)
    return (name, parameter.requires_grad, *placed, entry.aliases if entry.fqn == fqn else entry.fqn)


def _find_stack(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """The longest list of modules; the outermost of equal ones."""
    lists = [(len(m), -name.count("."), name) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    lists = [entry for entry in lists if not re.search(r"\.\d+(\.|$)", entry[2])]
    if not lists:
        return "", []
    path = max(lists)[2]
    return path, list(model.get_submodule(path))  # type: ignore[call-overload]


def _scalars(layer: nn.Module) -> dict[tuple[str, str], object]:
    """Class and plain attributes of every module of a layer."""
    found: dict[tuple[str, str], object] = {}
    for name, module in layer.named_modules():
        found[name, "class"] = type(module)
        for attribute, value in vars(module).items():
            if isinstance(value, int | float | str | None) and not attribute.startswith("__"):
                found[name, attribute] = value
    return found


def _numbering(described: Sequence[Mapping[tuple[str, str], object]]) -> set[tuple[str, str]]:
    """Attributes that only number the layers: wherever there is one it is the layer's index."""
    seen: dict[tuple[str, str], list[bool]] = {}
    for index, scalars in enumerate(described):
        for key, value in scalars.items():
            seen.setdefault(key, []).append(type(value) is int and value == index)
    return {key for key, same in seen.items() if len(same) > 1 and all(same)}


def _configs(model: nn.Module) -> list[Any]:
    """The configuration and its text part, once each."""
    config: Any = model.config
    text = config.get_text_config()
    return [config] if text is config else [config, text]


def _lists(config: Any, number: int) -> dict[str, list[Any]]:
    """Settings of a configuration with an entry for each of `number` layers."""
    return {name: v for name, v in vars(config).items() if isinstance(v, list) and len(v) == number}


def _repeats(kinds: Sequence[int], first: int, end: int) -> list[tuple[int, int, int]]:
    """(start, period, units) of stretches in [first, end) that repeat a unit more than twice.

    The stretch that saves most comes first; of equal ones that with the shortest unit, then the earliest.
    """
    saved, found = 0, (0, 0, 0)
    for period in range(1, (end - first) // 3 + 1):
        start = first
        while start + period < end:
            stop = start + period
            while stop < end and kinds[stop] == kinds[stop - period]:
                stop += 1
            units = (stop - start) // period
            if (units - 2) * period > saved:
                saved, found = (units - 2) * period, (start, period, units)
            start = stop - period + 1
    if not saved:
        return []
    start, period, units = found
    return [found, *_repeats(kinds, first, start), *_repeats(kinds, start + units * period, end)]
