"""A model with real weights: every rank keeps its slices of them."""

import weakref

import models
import pytest
import torch

import ndcompile
from ndcompile.errors import UnsupportedError
from ndcompile.verify.agreement import tensor_hash


@pytest.fixture(scope="module")
def sliced():
    model = models.build("llama", num_hidden_layers=1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fulls = [weakref.ref(parameter) for parameter in model.parameters()]
    buffers = dict(model.named_buffers())
    return ndcompile.compile(model, backend="aot_eager"), before, fulls, buffers


def test_values_stay(sliced):
    model, before, _, _ = sliced
    assert all(torch.equal(parameter.to_local(), before[name]) for name, parameter in model.named_parameters())


def test_full_tensors_are_released(sliced):
    assert all(full() is None for full in sliced[2])


def test_buffers_are_kept(sliced):
    model, _, _, buffers = sliced
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())


def test_the_forward_uses_them(sliced):
    ids = models.token_ids(2, 8)
    expected = models.build("llama", num_hidden_layers=1)(input_ids=ids).logits
    torch.testing.assert_close(sliced[0](input_ids=ids).logits, expected)


def test_a_mix_of_real_and_meta_parameters_is_refused_by_name():
    model = models.build("llama", num_hidden_layers=1)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to("meta"))
    with pytest.raises(UnsupportedError, match=r"'lm_head.weight' is on the meta device \(1 of 12 are\), but 'model"):
        ndcompile.compile(model)
    assert not isinstance(model.lm_head.weight, torch.distributed.tensor.DTensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_hash_sees_one_bit_the_order_and_the_shape(dtype):
    tensor = torch.arange(12).remainder(2).to(dtype).reshape(3, 4)
    flipped, swapped = tensor.clone(), tensor.clone()
    flipped.view(torch.uint8)[0, 0] ^= 1
    swapped[0, 0], swapped[0, 1] = tensor[0, 1], tensor[0, 0]
    assert tensor_hash(tensor) == tensor_hash(tensor.clone())
    assert len({tensor_hash(t) for t in (tensor, flipped, swapped, tensor.reshape(4, 3))}) == 4


def test_a_hash_of_a_strided_view_is_that_of_its_values():
    tensor = torch.randn(4, 6)
    assert tensor_hash(tensor.t()) == tensor_hash(tensor.t().contiguous())
