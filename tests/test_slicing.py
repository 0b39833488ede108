"""A model with real weights: every rank keeps its slices of them."""

import weakref

import models
import pytest
import torch

import ndcompile
from ndcompile.errors import UnsupportedError
from ndcompile.slicing import CHUNK, checksum


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
def test_a_checksum_sees_one_bit_and_the_order(dtype):
    tensor = torch.arange(CHUNK + 3).remainder(7).to(dtype).reshape(1, -1)
    flipped, swapped = tensor.clone(), tensor.clone()
    flipped.view(torch.uint8)[0, 0] ^= 1
    swapped[0, 0], swapped[0, 1] = tensor[0, 1], tensor[0, 0]
    assert checksum(tensor) == checksum(tensor.clone())
    assert len({checksum(tensor), checksum(flipped), checksum(swapped)}) == 3


def test_a_checksum_of_nothing_and_of_a_strided_view():
    assert checksum(torch.empty(0)) == 0
    tensor = torch.randn(4, 6)
    assert checksum(tensor.t()) == checksum(tensor.t().contiguous())
