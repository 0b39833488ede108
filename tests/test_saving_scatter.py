"""Rectangles of parameters land where the reverse conversion puts them, whatever the layout."""

import itertools
import math
import random

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from ndcompile.checkpoint.reversal import _symbol
from ndcompile.checkpoint.scatter import map_pieces, scatter
from ndcompile.checkpoint.writing import execute, plan_write
from ndcompile.loader.reshaping import Inexpressible
from ndcompile.parameters.layout import boxes, local_shape, narrow
from ndcompile.private.distributed import StridedShard


def _random_case(seed):
    """Shape, mesh, placements, and a function that makes the keys of a folder of the whole tensor."""
    rng = random.Random(seed)
    shape = torch.Size(rng.choice([1, 2, 4, 6, 7]) for _ in range(rng.randint(1, 4)))
    mesh = tuple(rng.choice([1, 2, 3]) for _ in range(rng.randint(1, 3)))
    placements = [rng.choice([Replicate(), Shard(rng.randrange(len(shape)))]) for _ in mesh]
    even = [dim for dim, size in enumerate(shape) if size % 2 == 0]
    if even and rng.random() < 0.5:
        placements[0] = StridedShard(rng.choice(even), split_factor=2)
    steps = [rng.choice(["chunk", "unbind", "transpose", "halves"]) for _ in range(rng.randint(0, 3))]
    dims = [rng.randrange(4) for _ in steps]

    def convert(tensor):
        keys = [tensor]
        for step, dim in zip(steps, dims, strict=True):
            keys = [made for key in keys for made in _apply(step, key, dim)]
        return keys

    return shape, mesh, placements, convert


def _apply(step, tensor, dim):
    if tensor.ndim == 0:
        return [tensor]
    dim %= tensor.ndim
    if step == "chunk":
        return [chunk.contiguous() for chunk in torch.chunk(tensor, 2, dim)]
    if step == "unbind":
        return list(torch.unbind(tensor, dim))
    if step == "transpose":
        return [tensor.transpose(0, dim).contiguous()]
    if tensor.shape[dim] % 2 == 0:  # as rotary embeddings permute their heads
        split = (*tensor.shape[:dim], 2, tensor.shape[dim] // 2, *tensor.shape[dim + 1 :])
        return [tensor.reshape(split).transpose(dim, dim + 1).reshape(tensor.shape)]
    return [tensor]


def _write(case, tmp_path, seed):
    """Every rank writes what it holds; the keys as read back, and how often each element was written."""
    shape, mesh, placements, convert = case
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + 1
    keys = convert(_symbol("w", shape, torch.float32))
    expected = convert(whole)
    path = tmp_path / str(seed)
    path.write_bytes(b"\0" * 4 * sum(key.numel() for key in expected))
    offsets = list(itertools.accumulate((4 * key.numel() for key in expected), initial=0))
    counts = [torch.zeros(key.shape) for key in expected]
    mapped = [map_pieces(key.pieces, shape) for key in keys]
    for coordinate in itertools.product(*map(range, mesh)):
        if any(isinstance(p, Replicate) and index for p, index in zip(placements, coordinate, strict=True)):
            continue
        local = torch.empty(local_shape(shape, placements, mesh, coordinate))
        held = list(boxes(shape, placements, mesh, coordinate))
        for box in held:
            narrow(local, box.local_offset, box.size).copy_(narrow(whole, box.global_offset, box.size))
        writes = []
        for number, key in enumerate(expected):
            for box, piece in itertools.product(held, mapped[number]):
                if (found := scatter(piece, box, local)) is not None:
                    start, view = found
                    narrow(counts[number], start, view.shape).add_(1)
                    writes.append(plan_write(path, offsets[number], key.shape, start, view))
        execute(writes, lambda nbytes: None, lambda: False)
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32)
    read = [data[a // 4 : b // 4].reshape(k.shape) for a, b, k in zip(offsets, offsets[1:], expected, strict=False)]
    return read, counts, expected


def test_all_ranks_together_write_every_element_of_every_key_once(tmp_path):
    expressible = 0
    for seed in range(600):
        try:
            read, counts, expected = _write(_random_case(seed), tmp_path, seed)
        except Inexpressible:
            continue
        expressible += 1
        for found, count, key in zip(read, counts, expected, strict=True):
            assert torch.equal(found, key), seed
            assert bool((count == 1).all()), seed
    assert expressible > 500


def test_a_dim_that_runs_over_the_end_of_a_row_is_inexpressible():
    flat = _symbol("w", torch.Size([4, 6]), torch.float32).reshape(24)
    with pytest.raises(Inexpressible, match="24 elements, 1 apart, go along no dim"):
        map_pieces(flat.pieces, (4, 6))
