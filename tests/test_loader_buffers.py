"""Buffers that are not saved get the values that from_pretrained gives them."""

from __future__ import annotations

import pytest
import torch
from loader_support import EXTRAS, on_meta, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from ndcompile.errors import UnsupportedError
from ndcompile.loader import materialize_buffers


def unsaved(model):
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name not in saved}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", EXTRAS)
def test_unsaved_buffers_equal_those_of_from_pretrained(tmp_path, model_type, dtype):
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path)
    expected = unsaved(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype))
    meta = on_meta(model, dtype)
    materialize_buffers(meta, "cpu")
    found = unsaved(meta)
    assert found.keys() == expected.keys()
    for name, buffer in found.items():
        assert buffer.dtype == expected[name].dtype, name
        assert torch.equal(buffer, expected[name]), name


def test_no_buffer_is_left_on_meta_and_no_parameter_is_touched():
    meta = on_meta(tiny_model("apertus"))
    before = dict(meta.named_parameters())
    materialize_buffers(meta, "cpu")
    assert not any(buffer.is_meta for buffer in meta.buffers())
    assert all(parameter is before[name] and parameter.is_meta for name, parameter in meta.named_parameters())


def test_buffers_and_parameters_with_values_stay_as_they_are():
    model = tiny_model("llama")
    model.model.register_buffer("on_meta", None)
    before = {name: (id(t), t.clone()) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.to("meta")
    materialize_buffers(model, "cpu")
    assert torch.equal(model.model.rotary_emb.inv_freq, before.pop("model.rotary_emb.inv_freq")[1])
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in before:
            assert (id(tensor), True) == (before[name][0], torch.equal(tensor, before[name][1])), name


def test_the_random_state_is_left_alone():
    meta = on_meta(tiny_model("llama"))
    before = torch.get_rng_state()
    materialize_buffers(meta, "cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_buffer_that_nothing_initialises_is_named():
    meta = on_meta(tiny_model("llama"))
    meta.model.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(UnsupportedError, match=r"buffer model.table is not saved"):
        materialize_buffers(meta, "cpu")


def test_a_model_whose_modules_are_marked_initialised_is_no_exception():
    meta = on_meta(tiny_model("llama"))
    for module in meta.modules():
        module._is_hf_initialized = True
    materialize_buffers(meta, "cpu")
    assert isinstance(meta.model.rotary_emb, nn.Module)
    assert torch.isfinite(meta.model.rotary_emb.inv_freq).all()
