"""Key-value caches as inputs and outputs of a graph.

A cache of transformers is a list of layers, each with tensors, flags and a count of the tokens that it has seen. The
graph takes the tensors and counts, runs the model on a copy of the cache, and returns the tensors that the model
replaced; those that it writes in place, as in a static cache, are graph inputs like any other. `CacheUpdate` puts the
results into the caller's cache. Under tp a rank's cache holds the heads of that rank.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticLayer

from ndcompile.errors import UnsupportedError
from ndcompile.private.transformers import CACHE_COUNTS, CACHE_LENGTHS, CACHE_SIZES, SEEN_TOKENS

CAPACITY = "max_cache_len"
MARK = "ndcompile_shards"
"""Attribute of a cache that a compiled model filled: its `CacheShards`."""
EMPTY = "ndcompile_empty"
"""Attribute of a static cache: whether it is known to hold no token, without reading the count from the device."""


@dataclass(frozen=True)
class CacheShards:
    """What a tp rank's tensors are of the whole ones, by path.

    varying: those that differ between tp ranks. times: how many times as large the whole tensor is, per dim.
    """

    varying: frozenset[str] = frozenset()
    times: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def between(cls, varying: frozenset[str], local: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> CacheShards:
        """From a rank's (fake) tensors and the whole ones. Sizes that are symbols are lengths, not cut by tp."""
        times = {
            path: tuple(
                total // own if isinstance(own, int) and isinstance(total, int) and own else 1
                for own, total in zip(tensor.shape, whole[path].shape, strict=True)
            )
            for path, tensor in local.items()
        }
        return cls(varying, {path: factors for path, factors in times.items() if set(factors) != {1}})


@dataclass(frozen=True)
class CacheState:
    """What a cache holds at a call, flattened.

    name: of the argument that takes it. lengths: the distinct numbers of tokens in it, which become symbols `past0`,
    `past1`, ... of the graph. capacities: the distinct numbers of tokens that layers of a static cache have room for.
    """

    cache: Cache
    name: str
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    lengths: tuple[int, ...]
    capacities: tuple[int, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that differ between calls of one signature, by name."""
        named = {"past": self.lengths, "capacity": self.capacities}
        return {f"{name}{number}": size for name, sizes in named.items() for number, size in enumerate(sizes)}

    @property
    def values(self) -> list[Any]:
        """The graph's inputs: tensors, and counts as numbers."""
        return [leaf for path, leaf in zip(self.paths, self.leaves, strict=True) if _is_input(path, leaf)]

    @property
    def names(self) -> list[str]:
        return [path for path, leaf in zip(self.paths, self.leaves, strict=True) if _is_input(path, leaf)]

    @property
    def named_values(self) -> dict[str, Any]:
        return dict(zip(self.names, self.values, strict=True))

    @property
    def total(self) -> int:
        """The most tokens that a layer has seen; 0 for a static cache, whose tensors do not grow with them."""
        return 0 if self.static else max(self.lengths, default=0)

    @property
    def static(self) -> bool:
        """Whether the tensors keep their size, and are written in place."""
        return is_static(self.cache)

    @property
    def holds_tensors(self) -> bool:
        """Whether a call went into this cache before."""
        return any(isinstance(leaf, Tensor) and leaf.ndim for leaf in self.leaves)

    @property
    def empty(self) -> bool:
        return getattr(self.cache, EMPTY, False)

    @property
    def shards(self) -> CacheShards:
        return getattr(self.cache, MARK, CacheShards())

    def whole(self) -> CacheState:
        """The same state in global shapes, without values: what a capture without tp reads."""
        leaves = list(self.leaves)
        for number, path in enumerate(self.paths):
            if (times := self.shards.times.get(path)) is not None:
                own = leaves[number]
                shape = [size * factor for size, factor in zip(own.shape, times, strict=True)]
                leaves[number] = own.new_empty(shape, device="meta")
        return replace(self, leaves=tuple(leaves))

    def key(self) -> tuple[Any, ...]:
        """What a graph is specialised on, besides lengths."""
        parts: list[Any] = [type(self.cache).__name__, *(type(layer).__name__ for layer in self.cache.layers)]
        parts += [str(self.spec), tuple(sorted(self.shards.varying)), self.empty]
        for path, leaf in zip(self.paths, self.leaves, strict=True):
            if isinstance(leaf, Tensor):
                sizes = tuple(-1 if dim in (0, _length_dim(path)) else size for dim, size in enumerate(leaf.shape))
                parts.append((leaf.dtype, leaf.device.type, sizes))
            else:
                constant = leaf.type if isinstance(leaf, torch.device) else leaf  # ranks have devices of their own
                name = "count" if _is_input(path, leaf) else CACHE_SIZES.get(_attribute(path)) if self.static else None
                parts.append(name or repr(constant))
        return tuple(parts)

    def shapes(self, batch: int) -> tuple[Any, ...]:
        """The inputs' shapes by the names of their sizes: two calls with the same ones can share a graph."""
        return tuple(
            self._shape(path, leaf, batch, "batch", [f"past{i}" for i in range(len(self.lengths))])
            for path, leaf in zip(self.paths, self.leaves, strict=True)
            if _is_input(path, leaf)
        )

    def fakes(self, batch: int, symbols: Mapping[str, Any], device: torch.device) -> list[Any]:
        """Fake inputs; call it in a fake mode. symbols: `batch` and every `past`, as numbers or symbols."""
        past, fakes = [symbols[f"past{i}"] for i in range(len(self.lengths))], []
        for path, leaf in zip(self.paths, self.leaves, strict=True):
            if _is_input(path, leaf):
                shape = self._shape(path, leaf, batch, symbols["batch"], past)
                if isinstance(leaf, Tensor):
                    on_host = not leaf.ndim and leaf.device.type == "cpu"
                    shape = torch.empty(shape, dtype=leaf.dtype, device=leaf.device if on_host else device)
                fakes.append(shape)
        return fakes

    def _shape(self, path: str, leaf: Any, batch: int, batch_size: Any, past: Sequence[Any]) -> Any:
        """Shape of a tensor, or the value of a count, in other sizes."""
        if not isinstance(leaf, Tensor):
            return past[self.lengths.index(leaf)]
        shape: list[Any] = list(leaf.shape)
        if leaf.ndim and leaf.shape[0] == batch:
            shape[0] = batch_size
        dim = self._growing(path)
        if dim is not None and shape[dim] in self.lengths:
            shape[dim] = past[self.lengths.index(leaf.shape[dim])]
        return tuple(shape)

    def _growing(self, path: str) -> int | None:
        """The dim of a tensor that grows with every token."""
        return None if self.static else _length_dim(path)

    def copy_with(self, values: Sequence[Any], device: torch.device) -> Cache:
        """A cache like this one with `values` in the places of the inputs, for a trace on `device`."""
        replacement = iter(values)
        leaves = [
            next(replacement) if _is_input(path, leaf) else device if isinstance(leaf, torch.device) else leaf
            for path, leaf in zip(self.paths, self.leaves, strict=True)
        ]
        copied = copy.copy(self.cache)
        copied.layers = [copy.copy(layer) for layer in self.cache.layers]
        for layer, state in zip(copied.layers, pytree.tree_unflatten(leaves, self.spec), strict=True):
            layer.__dict__ = state
            if self.empty:  # the model needs no mask then that hides what is not filled
                setattr(layer, SEEN_TOKENS, lambda: 0)
        return copied


def read_cache(cache: Any, name: str) -> CacheState:
    """Flatten a cache, which is the argument `name`.

    Raises UnsupportedError for one that is no list of layers, for an offloaded one, and for one with content that
    another model put there.
    """
    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        raise UnsupportedError(
            f"The {name} argument is a {type(cache).__name__}. A compiled model takes a cache with layers, such as "
            "DynamicCache(config=model.config)."
        )
    if getattr(cache, "offloading", False):
        raise UnsupportedError(
            f"The {name} argument is an offloaded cache, which a compiled model cannot take yet. Use "
            'DynamicCache(config=model.config), or generate with cache_implementation="static" or none.'
        )
    static = is_static(cache)
    with_paths, spec = pytree.tree_flatten_with_path([dict(vars(layer)) for layer in cache.layers])
    paths = tuple(pytree.keystr(path) for path, _ in with_paths)
    leaves = tuple(leaf for _, leaf in with_paths)
    lengths: dict[int, None] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        dim = None if static else _length_dim(path)
        if isinstance(leaf, Tensor) and dim is not None and leaf.ndim > dim:
            lengths[leaf.shape[dim]] = None
        elif not isinstance(leaf, Tensor) and _is_input(path, leaf) and any(isinstance(x, Tensor) for x in leaves):
            lengths[leaf] = None
    if any(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves) and not hasattr(cache, MARK):
        raise UnsupportedError(
            "The cache holds tokens that this model did not see when it was compiled: under tp every rank keeps "
            "the heads of its own. Start with an empty cache; of a static one the first call allocates the tensors."
        )
    capacities = {leaf: None for path, leaf in zip(paths, leaves, strict=True) if _attribute(path) == CAPACITY}
    return CacheState(cache, name, spec, leaves, paths, tuple(lengths), tuple(capacities) if static else ())


def is_static(cache: Cache) -> bool:
    """Whether a cache has layers of a fixed size."""
    return any(isinstance(layer, StaticLayer) for layer in cache.layers)


def new_cache(config: Any) -> Cache:
    """The cache that transformers makes for `use_cache=True`."""
    return DynamicCache(config=config.get_text_config(decoder=True))


def _is_input(path: str, leaf: Any) -> bool:
    return isinstance(leaf, Tensor) or (_attribute(path) in CACHE_COUNTS and isinstance(leaf, int) and leaf > 0)


def _length_dim(path: str) -> int | None:
    """The dim of a tensor of this name that counts tokens."""
    return CACHE_LENGTHS.get(_attribute(path))


def _attribute(path: str) -> str:
    """`[3]['keys']` -> `keys`."""
    return path.split("'")[1] if "'" in path else path
