"""What a graph does to a key-value cache, which `CacheUpdate` does to the caller's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from ndcompile.private.transformers import SEEN_TOKENS
from ndcompile.runtime.caches import EMPTY, MARK, CacheShards, CacheState


@dataclass(frozen=True)
class CacheUpdate:
    """What a graph does to a cache: its layers after the call.

    leaves: per leaf an `_Output`, an `_Input`, a `_Count`, `_KEPT` for what a call leaves alone, or the value itself.
    """

    layers: tuple[type, ...]
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    paths: tuple[str, ...]

    def apply(self, state: CacheState, outputs: Sequence[Tensor], evaluate: Callable[[Any], int]) -> None:
        """Change the caller's cache. `evaluate` gives the value of a symbolic count at this call."""
        inputs, counted, leaves = state.values, {}, []
        for number, leaf in enumerate(self.leaves):
            if leaf is _KEPT:
                leaf = state.leaves[number]
            elif isinstance(leaf, _Output):
                leaf = outputs[leaf.number]
            elif isinstance(leaf, _Input):
                leaf = inputs[leaf.number]
            elif isinstance(leaf, _Count):
                if leaf.value not in counted:
                    counted[leaf.value] = evaluate(leaf.value)
                leaf = counted[leaf.value]
            leaves.append(leaf)
        layers = state.cache.layers
        for kind in self.layers[len(layers) :]:
            layers.append(object.__new__(kind))
        for layer, values in zip(layers, pytree.tree_unflatten(leaves, self.spec), strict=True):
            layer.__dict__ = values

    def outputs(self) -> list[str]:
        """Paths of the tensors that the graph returns, in order."""
        return [path for path, leaf in zip(self.paths, self.leaves, strict=True) if isinstance(leaf, _Output)]

    def mark(self, cache: Cache, shards: CacheShards) -> None:
        """Note on the caller's cache what its tensors are of the whole ones."""
        setattr(cache, MARK, shards)
        setattr(cache, EMPTY, False)


@dataclass(frozen=True)
class _Output:
    number: int


@dataclass(frozen=True)
class _Input:
    number: int


@dataclass(frozen=True)
class _Count:
    value: Any


_KEPT = object()


def traced_update(cache: Cache, state: CacheState, inputs: Sequence[Any]) -> tuple[CacheUpdate, list[Tensor]]:
    """Read a copied cache after the trace: what happened to it, and the tensors that the graph has to return.

    state: the cache before. inputs: the traced values that were put into it.
    """
    for layer in cache.layers:
        layer.__dict__.pop(SEEN_TOKENS, None)
    with_paths, spec = pytree.tree_flatten_with_path([dict(vars(layer)) for layer in cache.layers])
    known = {id(value): number for number, value in enumerate(inputs) if isinstance(value, Tensor)}
    leaves: list[Any] = []
    outputs: list[Tensor] = []
    paths = tuple(pytree.keystr(path) for path, _ in with_paths)
    before = state.leaves if paths == state.paths else ()
    for number, (_, leaf) in enumerate(with_paths):
        if before and (leaf is before[number] or isinstance(before[number], torch.device)):
            leaves.append(_KEPT)
        elif isinstance(leaf, Tensor):
            if id(leaf) in known:
                leaves.append(_Input(known[id(leaf)]))
            else:
                leaves.append(_Output(len(outputs)))
                outputs.append(leaf)
        else:
            leaves.append(_Count(leaf.node.expr) if isinstance(leaf, torch.SymInt) else leaf)
    return CacheUpdate(tuple(map(type, cache.layers)), spec, tuple(leaves), paths), outputs
