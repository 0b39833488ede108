"""Symbolic tensors: whatever a converter does to them, their pieces say where the real values come from."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
import torch
from loader_support import assert_holds, on_meta, targets_of, tiny_model

import ndcompile.loader.conversion
from ndcompile.loader import load_into, reshaping
from ndcompile.loader.catalog import Entry
from ndcompile.loader.headers import Block, Stamp
from ndcompile.loader.reshaping import Inexpressible
from ndcompile.loader.symbolic import SymbolicTensor, symbol_of
from ndcompile.parameters.layout import narrow


def numbered(shape, first=0):
    """A tensor whose values are the bytes' places in a file of one-byte elements."""
    return torch.arange(first, first + torch.Size(shape).numel()).reshape(shape)


def symbol(shape, first=0):
    shape = torch.Size(shape)
    block = Block("w", Path("f"), first, torch.uint8, shape, (0,) * len(shape), Stamp(0, 0, 0))
    return symbol_of(Entry("w", torch.uint8, shape, (block,)))


def places(tensor):
    """The places in the file that the pieces of a symbolic tensor name; every element once."""
    result = torch.full(tensor.shape, -1)
    for start, size, block, offset, strides in tensor.pieces:
        view = narrow(result, start, size)
        assert (view == -1).all(), "two pieces overlap"
        flat = torch.arange(block.offset, block.offset + block.shape.numel())
        view.copy_(flat.as_strided(size, strides, offset))
    return result


def agree(function, *shapes):
    firsts = [sum(torch.Size(shape).numel() for shape in shapes[:n]) for n in range(len(shapes))]
    real = function(*(numbered(*pair) for pair in zip(shapes, firsts, strict=True)))
    made = function(*(symbol(*pair) for pair in zip(shapes, firsts, strict=True)))
    for symbolic, value in zip(made, real, strict=True) if isinstance(real, tuple | list) else [(made, real)]:
        assert isinstance(symbolic, SymbolicTensor)
        assert symbolic.shape == value.shape
        assert torch.equal(places(symbolic), value)


OPERATIONS = {
    "stack": lambda a, b: torch.stack([a, b], dim=1),
    "cat": lambda a, b: torch.cat([a, b], dim=-1),
    "chunk": lambda a, b: torch.chunk(torch.cat([a, b]), 3, dim=0),
    "split": lambda a, b: torch.split(a, [1, 5], dim=-1),
    "unbind": lambda a, b: torch.unbind(a, dim=1),
    "transpose": lambda a, b: a.transpose(0, 1).contiguous(),
    "permute": lambda a, b: a[None].permute(2, 0, 1).clone(),
    "select": lambda a, b: a[-1],
    "slice": lambda a, b: a[1:3, -2:],
    "squeeze": lambda a, b: a[:1].squeeze(0),
    "flatten": lambda a, b: torch.stack([a, b]).flatten(0, 1),
    "unflatten": lambda a, b: a.unflatten(1, (-1, 3)),
    "interleave": lambda a, b: a.reshape(2, 2, 6).transpose(0, 1).reshape(4, 6),
    "empty slice": lambda a, b: torch.cat([a[:0], b]),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_an_operation_moves_pieces_as_it_moves_elements(operation):
    agree(operation, (4, 6), (4, 6))


def test_random_chains_of_operations_move_pieces_as_they_move_elements():
    source = random.Random(0)
    for _ in range(400):
        count, shape = (
            source.choice([1, 2, 3]),
            [source.choice([1, 2, 3, 4, 6]) for _ in range(source.choice([1, 2, 3]))],
        )
        seed = source.random()
        agree(lambda *tensors, seed=seed: chain(tensors, random.Random(seed)), *[shape] * count)


def chain(tensors, source):
    join = source.choice([torch.stack, torch.cat])
    tensor = join(list(tensors), dim=source.randrange(tensors[0].ndim))
    for _ in range(source.choice([1, 2, 3, 4])):
        dim = source.randrange(tensor.ndim)
        kind = source.choice(["view", "permute", "chunk", "narrow"])
        if kind == "view":
            tensor = tensor.reshape(factors(tensor.numel(), source) if tensor.numel() else tensor.shape)
        elif kind == "permute":
            tensor = tensor.permute(source.sample(range(tensor.ndim), tensor.ndim))
        elif kind == "chunk":
            tensor = tensor.chunk(2, dim)[-1]
        else:
            start = source.randrange(tensor.shape[dim] + 1)
            tensor = tensor.narrow(dim, start, source.randrange(tensor.shape[dim] - start + 1))
    return tensor


def factors(number, source):
    """A random shape of `number` elements."""
    shape = []
    while number > 1:
        shape.append(source.choice([d for d in range(2, number + 1) if number % d == 0]))
        number //= shape[-1]
        shape += [1] * source.choice([0, 0, 1])
    return shape or [1]


@pytest.mark.parametrize(
    "operation",
    [
        lambda a: a + 1,
        lambda a: a.to(torch.float32),
        lambda a: torch.cat([a, a.new_zeros(1, 6)]),
        lambda a: a[:, [0, 3]],
        lambda a: a[::2],
        lambda a: a.sum(),
        lambda a: a.expand(3, 4, 6),
    ],
)
def test_an_operation_that_computes_is_inexpressible(operation):
    with pytest.raises(Inexpressible):
        operation(symbol((4, 6)))


def test_a_view_in_too_many_pieces_is_inexpressible(monkeypatch):
    monkeypatch.setattr(reshaping, "MAX_PIECES", 3)
    with pytest.raises(Inexpressible, match="more than 3"):
        symbol((4, 6)).t().reshape(24)


def test_a_group_that_is_inexpressible_is_converted_whole_and_logged(tmp_path, monkeypatch, caplog):
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)

    class Refusing(ndcompile.loader.conversion.SymbolicTensor):
        """Refuses to be stacked."""

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise Inexpressible(f"{func.overloadpacket} computes")

    def refusing(entry, dtype):
        return Refusing(entry.shape, dtype, ())

    monkeypatch.setattr(ndcompile.loader.conversion, "symbol_of", refusing)
    for coordinate in [(0, 0), (1, 2)]:
        meta = on_meta(model)
        targets = targets_of(meta, (2, 3), coordinate)
        with caplog.at_level(logging.WARNING, "ndcompile.loader"):
            load_into(meta, targets, tmp_path)
        assert_holds(targets, model.state_dict())
    (record,) = caplog.records
    assert "4 groups of keys are read and converted whole" in record.getMessage()
    assert "stack computes" in record.getMessage()
