"""The read plan and its execution: bytes of files into views of tensors."""

from __future__ import annotations

import os

import pytest
import torch
from loader_support import chunked, coordinates
from safetensors.torch import save_file
from torch.distributed.tensor import Replicate, Shard

from ndcompile.loader import Target, reading
from ndcompile.loader.catalog import read_catalog
from ndcompile.loader.pieces import pieces_of
from ndcompile.loader.reading import Read, execute, plan_reads
from ndcompile.parameters.layout import boxes, local_shape, narrow
from ndcompile.private.distributed import StridedShard


def saved(folder, **tensors):
    save_file(tensors, folder / "model.safetensors")
    return read_catalog(folder)


WHOLE = (Replicate(),)


def target(value, placements=WHOLE, mesh_shape=(1,), coordinate=(0,), dtype=None):
    local = torch.empty(local_shape(value.shape, placements, mesh_shape, coordinate), dtype=dtype or value.dtype)
    return Target("w", local, value.shape, placements, mesh_shape, coordinate)


def load(entry, target):
    return execute(plan_reads(pieces_of(entry), target.rectangles()))


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0, 2), (4, 6)], ids=str)
def test_every_dtype_and_shape_is_read_bit_by_bit(tmp_path, dtype, shape):
    value = torch.randint(0, 2, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
    value = value.view(dtype).reshape(shape)
    destination = target(value)
    load(saved(tmp_path, w=value)["w"], destination)
    assert torch.equal(destination.tensor.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(("source", "model"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_the_dtype_of_the_target_wins(tmp_path, source, model):
    value = torch.randn(9, 7).to(source)
    destination = target(value, (Shard(1),), (2,), (0,), dtype=model)
    load(saved(tmp_path, w=value)["w"], destination)
    assert torch.equal(destination.tensor, value[:, :4].to(model))


@pytest.mark.parametrize("gap", [0, 10, 1 << 20])
@pytest.mark.parametrize("staging", [64, 300, 8 << 20])
@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(2)),
        (Shard(1), Shard(1)),
        (Shard(2), Shard(1)),
        (StridedShard(1, split_factor=2), Shard(0)),
    ],
    ids=str,
)
def test_any_split_into_calls_reads_the_same(tmp_path, monkeypatch, placements, staging, gap):
    monkeypatch.setattr(reading, "STAGING_BYTES", staging)
    monkeypatch.setattr(reading, "MAX_GAP_BYTES", gap)
    value = torch.randn(5, 12, 7)
    entry = saved(tmp_path, w=value)["w"]
    for coordinate in coordinates((2, 3)):
        destination = target(value, placements, (2, 3), coordinate, dtype=torch.float64)
        load(entry, destination)
        expected = torch.empty_like(destination.tensor)
        for global_offset, local_offset, size in boxes(value.shape, placements, (2, 3), coordinate):
            narrow(expected, local_offset, size).copy_(narrow(value, global_offset, size))
        assert torch.equal(destination.tensor, expected)


def test_a_transposed_source_is_read_through_its_strides(tmp_path):
    value = torch.randn(6, 9)
    entry = saved(tmp_path, w=value)["w"]
    transposed = torch.empty(9, 6)
    (block,) = entry.blocks
    execute([Read(block.file, block.offset, (4, 36), block.dtype, transposed, block.stamp)])
    assert torch.equal(transposed, value.T)


def test_a_non_contiguous_destination_is_filled_in_place(tmp_path):
    value = torch.randn(6, 4)
    padded = torch.zeros(6, 10)
    view = padded[:, 3:7]
    destination = Target("w", view, value.shape, (Replicate(),), (1,), (0,))
    load(saved(tmp_path, w=value)["w"], destination)
    assert torch.equal(view, value)
    assert padded[:, :3].count_nonzero() == padded[:, 7:].count_nonzero() == 0


def test_a_parameter_that_needs_a_gradient_is_filled(tmp_path):
    value = torch.randn(4, 4)
    parameter = torch.nn.Parameter(torch.empty(4, 4))
    load(saved(tmp_path, w=value)["w"], Target("w", parameter, value.shape, (Replicate(),), (1,), (0,)))
    assert torch.equal(parameter, value)


def test_row_shards_read_exactly_their_bytes(tmp_path):
    value = torch.randn(10, 64)
    entry = saved(tmp_path, w=value)["w"]
    for rank in range(4):
        destination = target(value, (Shard(0),), (4,), (rank,))
        assert load(entry, destination) == destination.tensor.nbytes


def test_column_shards_with_wide_gaps_read_exactly_their_bytes(tmp_path):
    columns = 4 * reading.MAX_GAP_BYTES // 4
    value = torch.arange(3.0 * columns).reshape(3, columns)
    destination = target(value, (Shard(1),), (2,), (1,))
    assert load(saved(tmp_path, w=value)["w"], destination) == destination.tensor.nbytes
    assert torch.equal(destination.tensor, value[:, columns // 2 :])


def test_column_shards_with_narrow_gaps_read_no_more_than_their_rows(tmp_path):
    value = torch.randn(100, 64)
    destination = target(value, (Shard(1),), (4,), (1,))
    assert load(saved(tmp_path, w=value)["w"], destination) <= value.nbytes


def test_progress_adds_up_to_the_bytes_that_are_needed(tmp_path):
    value = torch.randn(100, 64)
    seen = []
    for placements in ((Shard(0),), (Shard(1),)):
        destination = target(value, placements, (4,), (1,))
        execute(plan_reads(pieces_of(saved(tmp_path, w=value)["w"]), destination.rectangles()), seen.append)
        assert sum(seen) == destination.tensor.nbytes
        seen.clear()


def test_the_loaded_tensor_is_a_copy(tmp_path):
    value = torch.ones(1000)
    entry, destination = saved(tmp_path, w=value)["w"], target(value)
    load(entry, destination)
    os.truncate(entry.blocks[0].file, 0)
    assert torch.equal(destination.tensor, value)


def test_many_files_and_tensors_are_read_by_all_workers(tmp_path):
    tensors = {f"w{i}": torch.full((17, 3), float(i)) for i in range(50)}
    catalog = saved(tmp_path, **tensors)
    targets = {key: target(value) for key, value in tensors.items()}
    execute(
        read
        for key, destination in targets.items()
        for read in plan_reads(pieces_of(catalog[key]), destination.rectangles())
    )
    assert all(torch.equal(targets[key].tensor, value) for key, value in tensors.items())


def test_a_target_of_the_wrong_local_shape_is_refused():
    with pytest.raises(ValueError, match=r"w: local shape \(4,\), its layout says \(2,\)"):
        Target("w", torch.empty(4), torch.Size((4,)), (Shard(0),), (2,), (0,))


def test_row_shards_of_all_ranks_make_the_tensor(tmp_path):
    value = torch.randn(7, 5)
    entry = saved(tmp_path, w=value)["w"]
    parts = []
    for rank in range(3):
        destination = target(value, (Shard(0),), (3,), (rank,))
        load(entry, destination)
        assert torch.equal(destination.tensor, chunked(value, (Shard(0),), (3,), (rank,)))
        parts.append(destination.tensor)
    assert torch.equal(torch.cat(parts), value)
