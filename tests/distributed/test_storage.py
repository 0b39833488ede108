"""What the model holds after compile: DTensors that torch's own tools take, over padded buffers."""

import re

import models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from workers import FSDP2_TP2, FSDP4, TP2

import ndcompile
from ndcompile.model_calls import compiled_model

UNEVEN = {"num_hidden_layers": 1, "vocab_size": 131}
IDS = models.token_ids(2, 8)


def _holds(model):
    """Whether every parameter and its state-dict entry is a DTensor whose whole is the plain model's tensor."""
    plain = dict(models.build("llama", **UNEVEN).named_parameters())
    states = [model.state_dict(), get_model_state_dict(model)]
    for state in states:
        assert set(state) == set(plain)
        assert all(isinstance(value, DTensor) for value in state.values())
    return all(torch.equal(states[0][name].full_tensor(), value) for name, value in plain.items())


def _uneven(checkpoint, layout):
    model = workers.compiled("llama", layout, checkpoint, UNEVEN)
    store = compiled_model(model).store
    slot = next(s for s in store.slots if s.entry.fqn == "lm_head.weight")
    return (
        _holds(model),
        tuple(slot.local.shape),
        tuple(slot.buffer.shape),
        slot.local.data_ptr() == slot.buffer.data_ptr(),
    )


def test_131_rows_on_fsdp4_are_padded_to_the_largest_shard(ranks, checkpoint):
    results = ranks(_uneven, checkpoint("llama", **UNEVEN), FSDP4)
    assert results == [(True, (rows, 64), (33, 64), True) for rows in (33, 33, 33, 32)]


def test_131_rows_on_fsdp2_tp2_are_padded_by_the_dim_that_tp_leaves(ranks, checkpoint):
    results = ranks(_uneven, checkpoint("llama", **UNEVEN), FSDP2_TP2)
    assert all(holds and shared for holds, _, _, shared in results)
    assert [local for _, local, _, _ in results] == [(66, 32), (65, 32)] * 2
    assert {buffer for _, _, buffer, _ in results} == {(66, 32)}


def _sliced(layout):
    """Compile a model that has its weights, watching how much of it is alive."""
    model = models.build("llama", **UNEVEN)
    total = sum(p.numel() for p in model.parameters())
    inv_freq = model.model.rotary_emb.inv_freq
    ndcompile.compile(model, workers.mesh(layout), backend="aot_eager")
    local = sum(p.to_local().untyped_storage().nbytes() // 4 for p in model.parameters())
    return _holds(model), local / total, model.model.rotary_emb.inv_freq is inv_freq


def test_real_weights_are_sliced_and_only_the_slices_stay(ranks):
    for holds, share, buffer_kept in ranks(_sliced, FSDP4):
        assert holds
        assert share < 0.27
        assert buffer_kept


def _identity(folder):
    model = workers.compiled("llama", TP2, None, UNEVEN)
    before = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ndcompile.load(model, folder)
    kept = all(a is b for a, b in zip(before, model.parameters(), strict=True))
    model(input_ids=IDS, labels=IDS).loss.backward()
    value = model.lm_head.weight.full_tensor()
    optimizer.step()
    return kept, (model.lm_head.weight.full_tensor() - value).abs().max().item() > 0


def test_load_keeps_the_identity_of_parameters_so_an_optimizer_may_exist(world, checkpoint):
    assert world(2)(_identity, checkpoint("llama", **UNEVEN)) == [(True, True)] * 2


def _some(model):
    """Few parameters, since the first foreach step on DTensors costs seconds; the head is uneven."""
    return [model.lm_head.weight, model.model.norm.weight, model.model.layers[0].mlp.down_proj.weight]


def _save(checkpoint, folder):
    model = workers.compiled("llama", FSDP2_TP2, checkpoint, UNEVEN)
    optimizer = torch.optim.AdamW(_some(model), lr=1e-2)
    rank = ndcompile.data_rank(model)
    model(input_ids=models.token_ids(2, 8, seed=rank), labels=models.token_ids(2, 8, seed=rank)).loss.backward()
    optimizer.step()
    dcp.save({"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)},
             checkpoint_id=folder)  # fmt: skip
    return _wholes(model, optimizer)


def _restore(folder):
    model = workers.compiled("llama", (("dp_replicate", 2), ("fsdp", 2)), None, UNEVEN)
    compiled_model(model).store.materialize()
    optimizer = torch.optim.AdamW(_some(model), lr=1e-2)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return _wholes(model, optimizer)


def _wholes(model, optimizer):
    names = {id(p): name for name, p in model.named_parameters()}
    moments = {names[id(p)]: state["exp_avg"].full_tensor() for p, state in optimizer.state.items()}
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}, moments


def test_dcp_loads_model_and_optimizer_into_another_mesh(ranks, checkpoint, tmp_path):
    saved = ranks(_save, checkpoint("llama", **UNEVEN), str(tmp_path))
    restored = ranks(_restore, str(tmp_path))
    for (values, moments), (expected, expected_moments) in zip(restored, saved, strict=True):
        assert all(torch.equal(values[name], expected[name]) for name in expected)
        assert len(expected_moments) == 3
        assert all(torch.equal(moments[name], expected_moments[name]) for name in expected_moments)
        assert any(moment.abs().max() > 0 for moment in moments.values())


def _to_dtype(checkpoint):
    model = workers.compiled("llama", FSDP2_TP2, checkpoint, UNEVEN)
    before = model(input_ids=IDS).logits
    model.to(torch.bfloat16)
    after = model(input_ids=IDS).logits
    after.float().sum().backward()
    return before.dtype, after.dtype, (after - before).abs().max().item(), model.lm_head.weight.grad.dtype


def test_to_another_dtype_captures_again(ranks, checkpoint):
    for before, after, difference, gradient in ranks(_to_dtype, checkpoint("llama", **UNEVEN)):
        assert (before, after, gradient) == (torch.float32, torch.bfloat16, torch.bfloat16)
        assert 0 < difference < 0.02


def _changed(checkpoint, how):
    model = workers.compiled("llama", TP2, checkpoint, UNEVEN)
    if how == "to another device":
        model.to("meta")
    elif how == "full state dict":
        model.load_state_dict(models.build("llama", **UNEVEN).state_dict())
    elif how == "full state dict, assigned":
        model.load_state_dict(models.build("llama", **UNEVEN).state_dict(), assign=True)
    elif how == "a new head":
        model.lm_head = torch.nn.Linear(64, 131, bias=False)
    model(input_ids=IDS)


@pytest.mark.parametrize(
    ("how", "kind", "part"),
    [
        ("to another device", ("NdcompileError", "UnsupportedError"), "is not loaded|on meta"),
        ("full state dict", ("RuntimeError", "UnsupportedError", "NotImplementedError"), "DTensor"),
        ("full state dict, assigned", ("UnsupportedError",), "was replaced after compile"),
        ("a new head", ("UnsupportedError",), "Module 'lm_head' was replaced after compile"),
    ],
)
def test_a_change_that_cannot_be_followed_raises_by_name(how, kind, part, world, checkpoint):
    for name, message in world(2).errors(_changed, checkpoint("llama", **UNEVEN), how):
        assert name in kind, message
        assert re.search(part, message), message


def _two_meshes(checkpoint):
    tp = workers.compiled("llama", FSDP2_TP2, checkpoint, UNEVEN)
    fsdp = workers.compiled("llama", FSDP4, checkpoint, UNEVEN)
    plain = models.build("llama", **UNEVEN)
    outputs = [model(input_ids=IDS).logits for model in (tp, fsdp, plain, tp)]
    dist.barrier()
    return [(output - outputs[2]).abs().max().item() for output in outputs]


def test_two_models_on_different_meshes_and_an_uncompiled_one_in_one_process(ranks, checkpoint):
    for errors in ranks(_two_meshes, checkpoint("llama", **UNEVEN)):
        assert max(errors) < 1e-5
