"""The same call again: what `generate` does for every token behind a static cache, without looking at everything anew.

Between two tokens of one `generate` neither the model nor its modes change, and the call has new tensors of the same
shapes. So the program and its inputs are those of the token before, if the cache is as that one left it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from ndcompile.capture.graph_input import ARGUMENT, BUFFER, CACHE, COORDINATE, PARAMETER, VARYING_CACHE, GraphInput
from ndcompile.private.transformers import CACHE_NAMES

REPEATABLE = frozenset({PARAMETER, BUFFER, COORDINATE, CACHE, VARYING_CACHE, ARGUMENT})
"""Kinds of inputs of a program that can be run again without asking for them anew."""


@dataclass(frozen=True)
class Replay:
    """A call, and the inputs of the program that served it.

    places: of the inputs that are arguments, the numbers of their leaves among the keyword arguments. held: what the
    layers of the cache hold.
    """

    program: Any
    inputs: Sequence[Any]
    places: Mapping[int, int]
    spec: pytree.TreeSpec
    leaves: Sequence[Any]
    cache: Cache
    held: Sequence[Any]

    @classmethod
    def of(
        cls, program: Any, specs: Sequence[GraphInput], inputs: Sequence[Any], keywords: dict[str, Any]
    ) -> Replay | None:
        """What a call that has been served says of the next one; None where that may need another program."""
        cache, leaves, spec = _flatten(keywords)
        captured = program.captured
        symbolic = any(not isinstance(symbol, int) for symbol in captured.symbols.values())
        if cache is None or captured.cache is None or symbolic or captured.cache.outputs() or captured.parameter_writes:
            return None
        numbers = {id(leaf): number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        arguments = [number for number, given in enumerate(specs) if given.kind == ARGUMENT]
        known = all(id(inputs[number]) in numbers for number in arguments)
        if not known or len(numbers) != len(arguments) or any(given.kind not in REPEATABLE for given in specs):
            return None
        places = {number: numbers[id(inputs[number])] for number in arguments}
        return cls(program, inputs, places, spec, leaves, cache, _held(cache))

    def again(self, keywords: dict[str, Any]) -> list[Any] | None:
        """The program's inputs for these arguments; None where they are not those of the same call."""
        cache, leaves, spec = _flatten(keywords)
        held = [] if cache is not self.cache else _held(self.cache)
        if len(held) != len(self.held) or not all(map(operator.is_, held, self.held)) or spec != self.spec:
            return None
        if not all(map(_alike, leaves, self.leaves)):
            return None
        inputs = list(self.inputs)
        for number, place in self.places.items():
            inputs[number] = leaves[place]
        return inputs


def _flatten(keywords: dict[str, Any]) -> tuple[Any, list[Any], pytree.TreeSpec]:
    """The cache, and the other arguments flattened."""
    caches = [value for name, value in keywords.items() if name in CACHE_NAMES]
    leaves, spec = pytree.tree_flatten({name: value for name, value in keywords.items() if name not in CACHE_NAMES})
    return (caches[0] if len(caches) == 1 and isinstance(caches[0], Cache) else None), leaves, spec


def _held(cache: Cache) -> list[Any]:
    return [value for layer in cache.layers for value in vars(layer).values()]


def _alike(leaf: Any, other: Any) -> bool:
    if isinstance(leaf, Tensor) and isinstance(other, Tensor):
        same = leaf.shape == other.shape and leaf.dtype == other.dtype and leaf.device == other.device
        return same and leaf.is_contiguous() and leaf.requires_grad == other.requires_grad
    return type(leaf) is type(other) and leaf == other
