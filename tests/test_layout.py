"""Layouts as pure functions: what each rank of a mesh holds."""

from __future__ import annotations

import pytest
import torch
from loader_support import chunked, coordinates
from torch.distributed.tensor import Partial, Replicate, Shard

from ndcompile.parameters.layout import boxes, intervals, local_shape, narrow
from ndcompile.private.distributed import StridedShard

R = Replicate()
LAYOUTS = [
    ((), (R, R), (2, 3)),
    ((7,), (Shard(0),), (4,)),
    ((3,), (Shard(0), Shard(0)), (2, 3)),
    ((0, 4), (Shard(0), Shard(1)), (2, 2)),
    ((10, 4), (Shard(0), Shard(0)), (2, 2)),
    ((12, 10), (R, Shard(1), Shard(0)), (2, 3, 2)),
    ((12, 10), (Shard(-1), Shard(0), Shard(-1)), (2, 3, 2)),
    ((6, 8, 5), (Shard(0), Shard(2), Shard(1), Shard(0)), (2, 2, 3, 2)),
]
PACKED = [
    ((12, 3), (StridedShard(0, split_factor=2),), (3,)),
    ((12, 3), (StridedShard(0, split_factor=2), Shard(0)), (2, 2)),
    ((10, 3), (StridedShard(0, split_factor=2), Shard(0)), (2, 3)),
    ((4, 18), (Shard(0), StridedShard(1, split_factor=3), Shard(1)), (2, 2, 2)),
]


def held_part(full, placements, mesh_shape, coordinate):
    """The local tensor, put together from boxes."""
    local = torch.full(local_shape(full.shape, placements, mesh_shape, coordinate), -1)
    for global_offset, local_offset, size in boxes(full.shape, placements, mesh_shape, coordinate):
        narrow(local, local_offset, size).copy_(narrow(full, global_offset, size))
    assert (local >= 0).all(), "boxes must tile the local tensor"
    return local


def numbered(shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


@pytest.mark.parametrize(("shape", "placements", "mesh_shape"), LAYOUTS)
def test_a_rank_holds_what_nested_chunks_give_it(shape, placements, mesh_shape):
    full = numbered(shape)
    for coordinate in coordinates(mesh_shape):
        expected = chunked(full, placements, mesh_shape, coordinate)
        assert torch.equal(held_part(full, placements, mesh_shape, coordinate), expected)


@pytest.mark.parametrize(("shape", "placements", "mesh_shape"), LAYOUTS + PACKED)
def test_all_ranks_together_hold_every_element_once_per_replica(shape, placements, mesh_shape):
    full = numbered(shape)
    count = torch.zeros_like(full)
    for coordinate in coordinates(mesh_shape):
        for global_offset, _, size in boxes(shape, placements, mesh_shape, coordinate):
            narrow(count, global_offset, size).add_(1)
    replicas = 1
    for placement, size in zip(placements, mesh_shape, strict=True):
        replicas *= size if isinstance(placement, Replicate) else 1
    assert (count == replicas).all()


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_packed_layout_equals_dtensor_where_sizes_divide(parts):
    full, placement = numbered((24, 2)), StridedShard(0, split_factor=parts)
    shards, _ = placement._split_tensor(full, 4, with_padding=False)
    for index, shard in enumerate(shards):
        assert torch.equal(held_part(full, (placement,), (4,), (index,)), shard)


def test_packed_layout_keeps_uneven_parts_apart():
    # gate rows 0..4 and up rows 5..9 over two ranks: each rank has as many gate rows as up rows.
    placement = (StridedShard(0, split_factor=2),)
    assert intervals((10,), placement, (2,), (0,)) == (((0, 3), (5, 8)),)
    assert intervals((10,), placement, (2,), (1,)) == (((3, 5), (8, 10)),)


def test_fsdp_after_packed_tp_chunks_the_local_tensor():
    full, placements = numbered((12, 3)), (StridedShard(0, split_factor=2), Shard(0))
    for tp in range(2):
        whole = held_part(full, placements[:1], (2,), (tp,))
        parts = [held_part(full, placements, (2, 2), (tp, fsdp)) for fsdp in range(2)]
        assert torch.equal(torch.cat(parts), whole)


def test_a_rank_beyond_the_last_chunk_holds_nothing():
    assert intervals((3, 5), (Shard(0),), (4,), (3,)) == ((), ((0, 5),))
    assert local_shape((3, 5), (Shard(0),), (4,), (3,)) == (0, 5)
    assert list(boxes((3, 5), (Shard(0),), (4,), (3,))) == []


@pytest.mark.parametrize(
    ("placement", "coordinate", "message"),
    [
        (Partial(), 0, "no layout"),
        (Shard(2), 0, "does not fit"),
        (Shard(0), 2, "outside the mesh"),
        (StridedShard(0, split_factor=3), 0, "3 equal parts"),
    ],
)
def test_an_impossible_layout_is_refused(placement, coordinate, message):
    with pytest.raises(ValueError, match=message):
        intervals((4, 4), (placement,), (2,), (coordinate,))
