"""Weights from the padded shards of ranks on one or two axes, and back, against the layout of each rank."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from ndcompile.operators.weight_shards import cut, join
from ndcompile.parameters.layout import local_shape

SIZES = [(1, 4), (4, 1), (2, 3), (3, 4), (4, 3)]
SHAPES = [((None,), 0), ((None, 2), 0), ((2, None), 1), ((2, 3, None), 2)]
"""Shapes with the sharded dim left open, and that dim."""


def _shards(x: Tensor, dim: int, sizes: tuple[int, int]) -> Tensor:
    """What the ranks hold, padded to the largest shard and concatenated on the first dim."""
    ranks = itertools.product(*map(range, sizes))
    lengths = [local_shape((x.shape[dim],), [Shard(0)] * 2, sizes, rank)[0] for rank in ranks]
    shards = [x.new_zeros(*x.shape[:dim], max(lengths), *x.shape[dim + 1 :]) for _ in lengths]
    for shard, part, length in zip(shards, x.split(lengths, dim), lengths, strict=True):
        shard.narrow(dim, 0, length).copy_(part)
    return torch.cat(shards)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
def test_shards_of_every_length_are_put_together_without_padding(shape, dim, sizes) -> None:
    for full in range(1, 30):
        whole = torch.randn([full if size is None else size for size in shape])
        assert torch.equal(join(_shards(whole, dim, sizes), dim, full, sizes), whole)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
def test_gradients_of_every_length_are_cut_and_padded_as_weights_are_stored(shape, dim, sizes) -> None:
    for full in range(1, 30):
        whole = torch.randn([full if size is None else size for size in shape])
        assert torch.equal(cut(whole, dim, sizes), _shards(whole, dim, sizes))
