"""Packed parameters for torch.distributed.checkpoint: DTensors of which a rank holds several rectangles.

gate_up under tp is [gate of this rank; up of this rank]: two runs of the whole tensor's rows. DTensor describes a
shard by one offset, so DCP would refuse to save such a tensor, and load wrong rows into it without a word. This
subclass tells DCP all rectangles. Whatever is made of one (state dicts, gradients, optimizer state, staged copies) is
one too, so that `get_model_state_dict` and `get_optimizer_state_dict` need nothing of ours.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from ndcompile.errors import UnsupportedError
from ndcompile.parameters.layout import Box, boxes, narrow
from ndcompile.private.distributed import NO_OFFSETS, StridedShard
from ndcompile.private.tracing import without_torch_function


def of_placements(tensor: DTensor) -> DTensor:
    """`tensor` itself, or as a PackedDTensor if a placement is packed; the local tensor is shared."""
    return _packed(tensor) if is_packed(tensor) else tensor


def is_packed(tensor: DTensor) -> bool:
    return any(isinstance(placement, StridedShard) for placement in tensor.placements)


class Unaddressed(StridedShard):
    """A packed placement, for code outside of DTensor: equal to it, but it names no offset."""

    def _local_shard_size_and_offset(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("offset_mode") == NO_OFFSETS:
            return super()._local_shard_size_and_offset(*args, **kwargs)
        raise UnsupportedError(
            f"{self} is packed: a rank's shard is several runs of dim {self.dim}, but torch asks for one offset. "
            "Save and load get_model_state_dict(model) and get_optimizer_state_dict(model, optimizer), without "
            "full_state_dict or broadcast_from_rank0, or use ndcompile.load and ndcompile.save_pretrained."
        )


class PackedDTensor(DTensor):
    """A DTensor that knows all rectangles of the whole tensor that its local tensor consists of."""

    # No __slots__ of its own: copies for async saves go by the attribute, which is DTensor's.

    @property
    def placements(self) -> tuple[Placement, ...]:
        """For code outside of DTensor, which would take the first of several offsets for the only one."""
        return tuple(
            Unaddressed(p.dim, split_factor=p.split_factor) if isinstance(p, StridedShard) else p
            for p in self._spec.placements
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        result = super().__torch_dispatch__(func, types, args, kwargs or {})
        return _like_its_arguments(result, (args, kwargs)) if func._schema.is_mutable else _all_packed(result)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch 2.11 asks no subclass of DTensor in `__torch_dispatch__`. So calls from Python are followed here, which
        is where state dicts and optimizers make their tensors."""
        with without_torch_function():
            result = func(*args, **(kwargs or {}))
        return _like_its_arguments(result, (args, kwargs))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(b.global_offset), torch.Size(b.size)) for b in self._boxes()]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        held = self._boxes()
        if len(held) > 1 and _goes_to_safetensors():
            raise UnsupportedError(
                f"{index.fqn} is packed: this rank holds {len(held)} parts of it, and HuggingFaceStorageWriter keeps "
                "one of them. Use ndcompile.save_pretrained, or dcp.save with its default writer."
            )
        for box in held:
            if torch.Size(box.global_offset) == index.offset:
                return narrow(self._local_tensor.detach(), box.local_offset, box.size)
        raise ValueError(f"{index.fqn} has no rectangle at {index.offset} on this rank; it has {held}")

    def _boxes(self) -> list[Box]:
        coordinate = self.device_mesh.get_coordinate()
        assert coordinate is not None
        return list(boxes(self.shape, self._spec.placements, tuple(self.device_mesh.shape), tuple(coordinate)))


def _goes_to_safetensors() -> bool:
    """Whether DCP asks for data in order to write it into a dict of one tensor a name. It does not tell, so its frame
    is looked at: the alternative is a checkpoint that lacks half of a tensor, in silence."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_write_files_from_queue":
            return frame.f_locals.get("serialization_format") == SerializationFormat.SAFETENSORS
        frame = frame.f_back
    return False


def _like_its_arguments(result: Any, arguments: Any) -> Any:
    """An operator in place returns its argument, not a second tensor on its memory. What holds no DTensor stays."""
    if not any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(result)):
        return result
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, DTensor)]
    given = {id(tensor._local_tensor): tensor for tensor in tensors}
    return pytree.tree_map_only(DTensor, lambda t: _given(t, given), result)


def _given(tensor: DTensor, given: dict[int, DTensor]) -> DTensor:
    return given[id(tensor._local_tensor)] if id(tensor._local_tensor) in given else _packed(tensor)


def _all_packed(result: Any) -> Any:
    return pytree.tree_map_only(DTensor, _packed, result)


def _packed(tensor: DTensor) -> PackedDTensor:
    if isinstance(tensor, PackedDTensor):
        return tensor
    return PackedDTensor(tensor._local_tensor, tensor._spec, requires_grad=tensor.requires_grad)
