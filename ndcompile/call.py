"""One call of a compiled model: its arguments bound by name and split into tensors and everything else."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ndcompile.errors import UnsupportedError


@dataclass(frozen=True)
class Call:
    """`leaves` are the flattened keyword arguments; `tensor_names` says where in them the tensors are.

    batch and sequence: the first two sizes of the token ids (or embeddings); 1 where there is none.
    """

    names: tuple[str, ...]
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    batch: int
    sequence: int

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

    def symbolic_shape(self, tensor: Tensor, batch: Any, sequence: Any) -> tuple[Any, ...]:
        """Shape of an argument with its batch and sequence dims named.

        dim 0 is batch and dim 1 sequence where the sizes agree with the token ids'; in a 4-D mask
        (batch, heads, query, key) the last two dims are sequence.
        """
        named = [("batch", batch, self.batch), ("sequence", sequence, self.sequence)]
        dims = {0: 0, 1: 1} if tensor.ndim < 4 else {0: 0, 2: 1, 3: 1}
        shape: list[Any] = list(tensor.shape)
        for dim, which in dims.items():
            _, symbol, size = named[which]
            if dim < tensor.ndim and shape[dim] == size and (size > 1 or dim == which):
                shape[dim] = symbol
        return tuple(shape)

    def key(self) -> tuple[Any, ...]:
        """What a graph is specialised on: names, structure, types, plain values, sizes but batch and sequence."""
        parts: list[Any] = [self.names, str(self.spec)]
        for leaf in self.leaves:
            if isinstance(leaf, Tensor):
                shape = self.symbolic_shape(leaf, "batch", "sequence")
                parts.append((leaf.dtype, leaf.device.type, shape, leaf.requires_grad))
            else:
                parts.append((type(leaf).__name__, repr(leaf)))
        return tuple(parts)


def bind(signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
    """Bind the arguments of a call by name. Arguments that are None are left out, as is `use_cache=False`'s default.

    Raises UnsupportedError for a key-value cache, and TypeError as Python words it for arguments that do not fit.
    """
    bound = signature.bind(*args, **kwargs).arguments
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(parameter.name, {}))
    arguments = {name: value for name, value in bound.items() if value is not None}
    if arguments.get("use_cache") or "past_key_values" in arguments:
        raise UnsupportedError(
            "A compiled model has no key-value cache yet: call it without past_key_values and use_cache. "
            "(Left unset, use_cache is off.)"
        )
    items = arguments.get("num_items_in_batch")
    if isinstance(items, int | float):  # another number each step must not be another graph
        arguments["num_items_in_batch"] = torch.tensor(items)
    with_paths, spec = pytree.tree_flatten_with_path(arguments)
    tokens = arguments.get("input_ids", arguments.get("inputs_embeds"))
    if tokens is None:
        tokens = next((leaf for _, leaf in with_paths if isinstance(leaf, Tensor) and leaf.ndim > 1), None)
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
    )
