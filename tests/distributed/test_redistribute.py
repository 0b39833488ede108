"""Every pair of the redistribute table, forward and backward on real ranks, against plain tensor algebra.

The reference holds all ranks' values in one process: the meaning of a type is a function of them, and the gradient of a
loss that every rank computes alike follows from it.
"""

import pytest
import torch
import workers
from torch import Tensor

from ndcompile.mesh import storage_mesh
from ndcompile.operators.redistribute import REDISTRIBUTE, average_gradient, redistribute, unshard

PAIRS = [(src.replace("S", "S(1)"), dst.replace("S", "S(1)")) for src, dst in REDISTRIBUTE]


def _global(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _shards(x: Tensor, size: int, dim: int = 1) -> list[Tensor]:
    """Equal shards, the last ones padded by zeros."""
    padding = -x.shape[dim] % size
    x = torch.cat([x, x.new_zeros(*x.shape[:dim], padding, *x.shape[dim + 1 :])], dim)
    return list(x.chunk(size, dim))


def _run(size: int, src: str, dst: str, width: int, dim: str = "1") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Value and gradient of this rank, and what they must be.

    The whole value is `whole`; a partial one is cut into random summands. The loss is linear with weights `w`: alike on
    all ranks for I, this rank's own for R (each rank uses the value on other shards) and for shards.
    """
    src, dst = src.replace("1", dim), dst.replace("1", dim)
    axis = storage_mesh(workers.mesh((("tp", size),))).axes["tp"]
    rank, at = axis.coordinate, int(dim)
    whole = _global(0, 3, width, 2) if at == 1 else _global(0, width, 3, 2)
    summands = [_global(10 + r, *whole.shape) for r in range(size - 1)]
    summands.append(whole - sum(summands))
    held = {"I": whole, "R": whole, "P": summands[rank], "S": _shards(whole, size, at)[rank]}
    value = held[src[0]].clone().requires_grad_()
    coordinate = torch.tensor(rank)
    moved = redistribute(value, axis.group, size, src, dst, width if "S" in src + dst else None, coordinate)

    common = _global(1, *whole.shape)
    own = [_global(20 + r, *whole.shape) for r in range(size)]
    if dst == "I":
        weights, gradient = common, common
    elif dst == "R":
        weights, gradient = own[rank], sum(own)
    else:
        weights, gradient = _shards(common, size, at)[rank], common
    moved.backward(weights)
    expected = {"I": whole, "R": whole, "S": _shards(whole, size, at)[rank]}[dst[0]]
    expected_gradient = _shards(gradient, size, at)[rank] if src.startswith("S") else gradient
    return moved.detach(), expected, value.grad, expected_gradient


def _errors(*args):
    moved, expected, gradient, expected_gradient = _run(*args)
    assert moved.shape == expected.shape
    assert gradient.shape == expected_gradient.shape
    return workers.error(moved, expected), workers.error(gradient, expected_gradient)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("width", [8, 7], ids=["even", "uneven"])
@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_pair(world, src, dst, width, size):
    for errors in world(size)(_errors, size, src, dst, width):
        assert max(errors) < 1e-12


@pytest.mark.parametrize(("src", "dst"), [pair for pair in PAIRS if "S(1)" in pair])
def test_pair_on_the_first_dim(world, src, dst):
    for errors in world(2)(_errors, 2, src, dst, 7, "0"):
        assert max(errors) < 1e-12


def _unshard(rows, mean):
    """A weight gathered from 4 shards; its gradient is the mean of the ranks' gradients."""
    axis = storage_mesh(workers.mesh((("fsdp", 4),))).axes["fsdp"]
    rank, weight = axis.coordinate, _global(0, rows, 3)
    shard = _shards(weight, 4, 0)[rank].requires_grad_()
    full = unshard(shard, axis.group, 4, 0, rows, torch.float64, mean)
    gradients = [_global(5 + r, rows, 3) for r in range(4)]
    full.backward(gradients[rank])
    expected = _shards(sum(gradients) / 4, 4, 0)[rank]
    return workers.error(full.detach(), weight), workers.error(shard.grad, expected)


@pytest.mark.parametrize("rows", [8, 10, 3], ids=["even", "uneven", "empty_shards"])
def test_unshard_gathers_a_weight_and_averages_its_gradient(ranks, rows):
    for errors in ranks(_unshard, rows, "sum"):
        assert max(errors) < 1e-12


def _low_precision_unshard():
    """A float32 weight gathered in bf16: the ranks' gradients are summed in float32."""
    axis = storage_mesh(workers.mesh((("fsdp", 4),))).axes["fsdp"]
    shard = torch.zeros(1, 1, requires_grad=True)
    full = unshard(shard, axis.group, 4, 0, 4, torch.bfloat16, "sum")
    full.backward(torch.full((4, 1), 1.0 if axis.coordinate else 1.0 + 2**-7, dtype=torch.bfloat16))
    return full.dtype, shard.grad


def test_a_bf16_gather_reduces_gradients_in_the_stored_dtype(ranks):
    for dtype, gradient in ranks(_low_precision_unshard):
        assert dtype == torch.bfloat16
        assert gradient.dtype == torch.float32
        assert gradient.item() == 1.0 + 2**-9  # bf16 has 8 bits


def _average():
    axis = storage_mesh(workers.mesh((("dp_replicate", 4),))).axes["dp_replicate"]
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    y = average_gradient(x, axis.group, 4, "sum")
    y.backward(torch.full((2,), float(axis.coordinate), dtype=torch.float64))
    return y.tolist(), x.grad.tolist()


def test_average_gradient_keeps_the_value_and_means_the_gradient(ranks):
    assert ranks(_average) == [([1.0, 1.0], [1.5, 1.5])] * 4
