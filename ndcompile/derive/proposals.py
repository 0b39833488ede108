"""What may be tried for a pair, the most likely first. All of it is general; whether it is right is for the proof."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import partial

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ndcompile.derive.dataflow import Pair, features, pattern_of
from ndcompile.plans.styles import LOCAL_COUNT

Rules = dict[str, str]

COLUMN_STYLES = {
    ("linear", 1): "colwise",
    ("linear", 2): "packed_colwise",
    ("linear", 3): "packed3_colwise",
    ("transposed", 1): "colwise_transposed",
    ("transposed", 2): "packed_colwise_transposed",
    ("transposed", 3): "packed3_colwise_transposed",
}
"""(layout of the weight, projections that stand behind each other in it) -> style."""
ROW_STYLES = {"linear": "rowwise", "transposed": "rowwise_transposed"}

MOST_PROPOSALS = 24
"""Tried for a pair, most of which the capture in local shapes ends at once."""
MOST_COUNTS = 4
"""Of so many integers all choices are tried; of more, those with the smallest values: heads are fewer than widths."""


class Modules:
    """The modules, parameters and integers of a model by their names with `*` for numbers."""

    def __init__(self, model: nn.Module) -> None:
        self.pattern = partial(pattern_of, model)
        self.first = {self.pattern(name): module for name, module in reversed(list(model.named_modules()))}
        self.parameters = {self.pattern(name): p for name, p in model.named_parameters(remove_duplicate=False)}
        self.integers: dict[str, set[int]] = {}
        for fqn, module in model.named_modules():
            for name, value in vars(module).items():
                if type(value) is int:
                    self.integers.setdefault(f"{self.pattern(fqn)}.{name}", set()).add(value)

    def layout(self, linear: str) -> str:
        return "transposed" if isinstance(self.first[linear], Conv1D) else "linear"

    def elements(self, linears: Iterable[str]) -> int:
        """How many numbers their weights hold."""
        return sum(math.prod(features(self.first[name])) for name in linears)


def pair_proposals(pair: Pair, modules: Modules, read: set[str], tp: int) -> Iterator[Rules]:
    """Rules that make a pair colwise and rowwise.

    Tried are: which of the integers that the code between reads (`read`) count what tp cuts; whether a fused
    projection's parts stand behind each other, or take turns; whether parameters of the pair's width are cut.
    """
    width = features(modules.first[pair.row])[1]
    fused = {features(modules.first[name])[0] // width for name in pair.columns} & {2, 3}
    between = _cut_parameters(pair, modules, width, tp)
    counts = _subsets(_counts(pair, modules, read, tp))
    choices = itertools.product(counts, [*sorted(fused), 1], [between, {}] if between else [{}])
    for shared, parts, cut in itertools.islice(choices, MOST_PROPOSALS):
        rules = {name: _column_style(modules, pair, name, parts) for name in pair.columns}
        rules[pair.row] = ROW_STYLES[modules.layout(pair.row)]
        yield rules | cut | dict.fromkeys(shared, LOCAL_COUNT)


def _cut_parameters(pair: Pair, modules: Modules, width: int, tp: int) -> Rules:
    """Of the parameters between, those of the pair's width; of tables that are looked up, their columns."""
    shapes = {name: modules.parameters[name].shape for name in (*pair.parameters, *pair.tables)}
    rules = {
        name: "colwise" if len(shapes[name]) <= 2 else "first_dim"
        for name in pair.parameters
        if shapes[name][:1] == (width,)
    }
    return rules | {name: "embedding_colwise" for name in pair.tables if shapes[name][-1] % tp == 0}


def _column_style(modules: Modules, pair: Pair, name: str, parts: int) -> str:
    """A column that itself takes the width of the pair, and gives another, sums up within the pair."""
    width = features(modules.first[pair.row])[1]
    out, taken = features(modules.first[name])
    if name in pair.inner and taken == width and out != width:
        return ROW_STYLES[modules.layout(name)]
    return COLUMN_STYLES[modules.layout(name), parts if out == parts * width else 1]


def _counts(pair: Pair, modules: Modules, read: set[str], tp: int) -> list[str]:
    """Integers that the code between reads, that divide the width or hold it, and that tp divides in every layer."""
    width = features(modules.first[pair.row])[1]
    names = {name for name in map(modules.pattern, read) if name.rpartition(".")[0] in pair.modules}
    divisible = [name for name in names if all(v >= tp and v % tp == 0 for v in modules.integers[name])]
    fit = [name for name in divisible if all(width % v == 0 or v % width == 0 for v in modules.integers[name])]
    return sorted(fit, key=lambda name: (max(modules.integers[name]), name))[:MOST_COUNTS]


def _subsets(names: list[str]) -> Iterator[tuple[str, ...]]:
    for size in range(len(names) + 1):
        yield from itertools.combinations(names, size)


def vocabulary_proposals(model: PreTrainedModel) -> Iterator[Rules]:
    """Rules that cut the vocabulary of the embedding and of the head; tied ones together."""
    pattern = partial(pattern_of, model)
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    inputs, outputs = {}, {}
    if isinstance(embedding, nn.Embedding):
        inputs = {pattern(names[id(embedding)]): "embedding_rowwise"}
    if isinstance(head, nn.Linear):
        outputs = {pattern(names[id(head)]): "colwise_gather_output"}
        own = {id(p) for p in head.parameters()}
        for name, p in model.named_parameters(remove_duplicate=False):
            owner = pattern(name.rpartition(".")[0])
            if id(p) in own and owner not in {*inputs, *outputs}:
                outputs[pattern(name)] = "colwise"
    yield from filter(None, [{**inputs, **outputs}, outputs if inputs else {}, inputs if outputs else {}])
