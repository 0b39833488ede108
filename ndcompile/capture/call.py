"""One call of a compiled model: its arguments bound by name and split into tensors and everything else."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ndcompile.private.transformers import CACHE_NAMES
from ndcompile.runtime.caches import CacheState, new_cache, read_cache


@dataclass(frozen=True)
class Call:
    """`leaves` are the flattened keyword arguments; `tensor_names` says where in them the tensors are.

    batch and sequence: the first two sizes of the token ids (or embeddings); 1 where there is none. cache: the
    key-value cache that the call reads and writes, which is not among the leaves.
    """

    names: tuple[str, ...]
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    batch: int
    sequence: int
    cache: CacheState | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that may be symbols of a graph."""
        return {"batch": self.batch, "sequence": self.sequence} | ({} if self.cache is None else self.cache.sizes)

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The shapes of all inputs by the names of their sizes: calls with the same ones can share a graph."""
        names = {name: name for name in self.sizes}
        own = tuple(self.symbolic_shape(tensor, names) for tensor in self.tensors)
        return own if self.cache is None else own + self.cache.shapes(self.batch)

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def tensor_names(self) -> list[str]:
        return [path for path, leaf in zip(self.paths, self.leaves, strict=True) if isinstance(leaf, Tensor)]

    @property
    def named_tensors(self) -> dict[str, Tensor]:
        return dict(zip(self.tensor_names, self.tensors, strict=True))

    def with_tensors(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """The keyword arguments with other tensors (fakes, traced ones) in their places."""
        replacement = iter(tensors)
        leaves = [next(replacement) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def symbolic_shape(self, tensor: Tensor, symbols: Mapping[str, Any]) -> tuple[Any, ...]:
        """Shape of an argument with its batch and sequence dims replaced by `symbols`, which has a value per size.

        dim 0 is batch and dim 1 sequence where the sizes agree with the token ids'; in a 4-D mask
        (batch, heads, query, key) the last two dims are sequence. A mask may also be as long as cache and sequence, or
        as what a static cache has room for.
        """
        dims = {0: "batch", 1: "sequence"} if tensor.ndim < 4 else {0: "batch", 2: "sequence", 3: "sequence"}
        shape: list[Any] = list(tensor.shape)
        for dim, name in dims.items():
            if dim >= tensor.ndim:
                continue
            size, own = shape[dim], self.sizes[name]
            past, capacities = (0, ()) if self.cache is None else (self.cache.total, self.cache.capacities)
            if size == own and (size > 1 or dim == list(dims.values()).index(name)):
                shape[dim] = symbols[name]
            elif name == "sequence" and size in capacities:
                shape[dim] = symbols[f"capacity{capacities.index(size)}"]
            elif past and name == "sequence" and size == past + own:
                longest = symbols[f"past{self.cache.lengths.index(past)}"]  # type: ignore[union-attr]
                named = isinstance(symbols[name], str)
                shape[dim] = f"{longest} + {name}" if named else longest + symbols[name]
        return tuple(shape)

    def key(self) -> tuple[Any, ...]:
        """What a graph is specialised on: names, structure, types, plain values, sizes but batch and sequence."""
        parts: list[Any] = [self.names, str(self.spec)]
        for leaf in self.leaves:
            if isinstance(leaf, Tensor):
                names = {name: name.rstrip("0123456789") for name in self.sizes}
                shape = self.symbolic_shape(leaf, names)
                if leaf.ndim == 4 and isinstance(shape[3], str) and self.cache is not None and self.cache.static:
                    shape = (*shape[:3], "keys")  # a window is as long as the cache's layer, or as a prompt beyond it
                parts.append((leaf.dtype, leaf.device.type, shape, leaf.requires_grad))
            else:
                parts.append((type(leaf).__name__, repr(leaf)))
        return tuple(parts) if self.cache is None else (*parts, self.cache.key())


def bind(signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any], config: Any = None) -> Call:
    """Bind the arguments of a call by name. Arguments that are None are left out, as is `use_cache=False`'s default.

    config: the model's, for the cache that `use_cache=True` asks for.

    Raises UnsupportedError for a cache that a graph cannot take, and TypeError as Python words it for arguments that do
    not fit.
    """
    bound = signature.bind(*args, **kwargs).arguments
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(parameter.name, {}))
    arguments = {name: value for name, value in bound.items() if value is not None}
    given = [arguments.pop(name) for name in CACHE_NAMES if name in arguments]
    cache = given[0] if given else new_cache(config) if arguments.get("use_cache") else None
    if cache is not None:
        arguments.setdefault("use_cache", True)  # the traced model's own default is off
    items = arguments.get("num_items_in_batch")
    if isinstance(items, int | float):  # another number each step must not be another graph
        arguments["num_items_in_batch"] = torch.tensor(items)
    with_paths, spec = pytree.tree_flatten_with_path(arguments)
    tokens = arguments.get("input_ids", arguments.get("inputs_embeds"))
    if tokens is None:
        tokens = next((leaf for _, leaf in with_paths if isinstance(leaf, Tensor) and leaf.ndim > 1), None)
    if tokens is not None and not isinstance(tokens, Tensor):
        name = "input_ids" if "input_ids" in arguments else "inputs_embeds"
        raise TypeError(
            f"{name} is a {type(tokens).__name__}, not a tensor. Pass torch.tensor(...), or call the tokenizer with "
            'return_tensors="pt".'
        )
    batch, sequence = tuple(tokens.shape[:2]) if tokens is not None and tokens.ndim > 1 else (1, 1)
    if not batch or not sequence:
        raise ValueError(f"Empty input: batch {batch}, sequence length {sequence}.")
    return Call(
        names=tuple(arguments),
        spec=spec,
        leaves=tuple(leaf for _, leaf in with_paths),
        paths=tuple(pytree.keystr(path) for path, _ in with_paths),
        batch=batch,
        sequence=sequence,
        cache=None if cache is None else read_cache(cache, _cache_name(signature)),
    )


def _cache_name(signature: inspect.Signature) -> str:
    """What this forward calls its cache."""
    return next((name for name in CACHE_NAMES if name in signature.parameters), CACHE_NAMES[0])
