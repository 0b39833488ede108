"""Static caches: tensors of a fixed size that keep their address, which every graph writes in place.

transformers allocates a layer's tensors when the layer first sees keys. In a graph they would be outputs, new at every
prompt. So they are allocated before the first graph runs, in the shapes that a capture of the call finds: the heads of
this rank under tp. From there on prompt and single tokens are programs of static shapes on the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from transformers.cache_utils import Cache

from ndcompile.capture.capture import Captured
from ndcompile.errors import UnsupportedError
from ndcompile.mesh import StorageMesh
from ndcompile.plans.sharding_plan import ShardingPlan
from ndcompile.private.transformers import CACHE_LENGTHS, CACHE_MEMORY
from ndcompile.runtime.caches import CAPACITY, EMPTY, MARK, CacheShards
from ndcompile.verify.type_inference import varying_over_tp


@dataclass(frozen=True)
class TensorMemory:
    """A tensor of a layer of the cache: shape of a state without batch and tokens, which are 1 and 0 in it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, attribute: str, tensor: Tensor) -> TensorMemory:
        sizes = {0: 1, CACHE_LENGTHS[attribute]: 0}
        return cls(tuple(sizes.get(dim, int(size)) for dim, size in enumerate(tensor.shape)), tensor.dtype)

    def state(self, batch: int, device: torch.device) -> Tensor:
        """What a layer that has seen no token is given to allocate its tensors by."""
        return torch.zeros((batch, *self.shape[1:]), dtype=self.dtype, device=device)


@dataclass(frozen=True)
class CacheMemory:
    """The tensors of a new static cache on this rank, by path, and what they are of the whole ones."""

    tensors: Mapping[str, TensorMemory]
    shards: CacheShards

    @classmethod
    def of(cls, nodes: Mapping[str, fx.Node], shards: CacheShards) -> CacheMemory:
        """From the captured graph of a call in which the layers allocate them."""
        attributes = {path: path.split("'")[1] for path in nodes}
        known = {path: name for path, name in attributes.items() if name in CACHE_LENGTHS}
        return cls({path: TensorMemory.of(name, nodes[path].meta["val"]) for path, name in known.items()}, shards)

    def allocate(self, cache: Cache, batch: int, device: torch.device) -> None:
        """Give the layers of the caller's cache their tensors, filled with zeros."""
        for number, layer in enumerate(cache.layers):
            for method, names in CACHE_MEMORY.items():
                found = [self.tensors.get(f"[{number}]['{name}']") for name in names]
                states = [memory.state(batch, device) for memory in found if memory is not None]
                if len(states) == len(names):
                    getattr(layer, method)(*states)
        setattr(cache, MARK, self.shards)
        setattr(cache, EMPTY, True)


def cache_shards(
    captured: Captured, whole: Callable[[], Captured] | None, plan: ShardingPlan, mesh: StorageMesh
) -> CacheShards:
    """What the tensors of the cache are of the whole ones after a graph; `whole` captures it in global shapes."""
    if captured.cache is None or whole is None or "tp" not in mesh.axes:
        return CacheShards()
    varying = varying_over_tp(captured.module.graph, plan, mesh.axes["tp"].group)
    return CacheShards.between(
        frozenset(path for path, node in captured.cache_nodes.items() if node in varying),
        {path: node.meta["val"] for path, node in captured.cache_nodes.items()},
        {path: node.meta["val"] for path, node in whole().cache_nodes.items()},
    )


@dataclass
class KeptCache:
    """The static cache of the last `generate`, for the next one of the same sizes: a CUDA graph is recorded for the
    addresses of its tensors."""

    key: object = None
    cache: Cache | None = None

    def instead_of(self, fresh: Cache, batch: int, dtype: torch.dtype) -> Cache:
        """`fresh`, or the kept cache if that is the same but for its address; it then holds no token."""
        layers = [(type(layer), getattr(layer, CAPACITY, None)) for layer in fresh.layers]
        key = (layers, batch, dtype, torch.is_inference_mode_enabled())
        if self.cache is None or self.key != key:
            self.key, self.cache = key, fresh
        elif hasattr(self.cache, MARK):
            self.cache.reset()
            setattr(self.cache, EMPTY, True)
        return self.cache


def refuse_gradients(model: nn.Module) -> None:
    """Raises UnsupportedError where autograd would follow what is written into a static cache."""
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters()):
        raise UnsupportedError(
            "A static cache is written in place, which has no gradient here. Call the model under torch.no_grad() (or "
            "torch.inference_mode()), or use a DynamicCache."
        )
