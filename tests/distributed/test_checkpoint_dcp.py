"""torch.distributed.checkpoint on the stock state dicts, packed parameters among them."""

import models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from matrix import sampled_rows
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from workers import FSDP2_TP2, FSDP4

import ndcompile
from ndcompile.model_calls import compiled_model

ONE = {"num_hidden_layers": 1}
REPLICATE2_TP2 = workers.REPLICATE2_TP2
PACKED = "model.layers.0.mlp.experts.gate_up_proj"


def _some(model):
    """Few parameters, since the first foreach step on DTensors costs seconds; the first is packed under tp."""
    return [model.get_parameter(PACKED), model.model.norm.weight, model.lm_head.weight]


def _step(model, optimizer, seed):
    """One step on this rank's part of a global batch that is the same on every mesh; the mean loss."""
    rows = 4 // ndcompile.data_world_size(model)
    ids = models.token_ids(4, 8, seed=seed)[rows * ndcompile.data_rank(model) :][:rows]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    model.zero_grad()
    dist.all_reduce(loss := loss.detach())
    return loss.item() / dist.get_world_size()


def _state(model, optimizer):
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _wholes(model, optimizer):
    names = {id(p): name for name, p in model.named_parameters()}
    moments = {
        f"{names[id(p)]} {kind}": workers.full(value).clone()
        for p, state in optimizer.state.items()
        for kind, value in state.items()
    }
    return {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()} | moments


def _save(name, checkpoint, folder, how):
    model = workers.compiled(name, FSDP2_TP2, checkpoint, ONE)
    optimizer = torch.optim.AdamW(_some(model), lr=1e-2, foreach=True)
    _step(model, optimizer, 0)
    wholes = _wholes(model, optimizer)
    if how == "async":
        future = dcp.async_save(_state(model, optimizer), checkpoint_id=folder)
        losses = [_step(model, optimizer, seed) for seed in (1, 2)]  # what is saved is the state before
        future.result()
    else:
        dcp.save(_state(model, optimizer), checkpoint_id=folder)
        losses = [_step(model, optimizer, seed) for seed in (1, 2)]
    return wholes, losses


def _resume(name, folder, layout):
    model = workers.compiled(name, layout, None, ONE)
    ndcompile.init_weights(model, 1)
    optimizer = torch.optim.AdamW(_some(model), lr=1e-2, foreach=True)
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    wholes = _wholes(model, optimizer)
    return wholes, [_step(model, optimizer, seed) for seed in (1, 2)]


@pytest.mark.parametrize(
    ("name", "how", "layout"),
    sampled_rows([("mixtral", "save", REPLICATE2_TP2), ("qwen3_moe", "async", FSDP4)], 0),
)
def test_a_run_resumes_on_another_mesh_with_the_same_losses(name, how, layout, ranks, checkpoint, tmp_path):
    saved = ranks(_save, name, checkpoint(name, **ONE), str(tmp_path), how)
    resumed = ranks(_resume, name, str(tmp_path), layout)
    for (wholes, losses), (expected, expected_losses) in zip(resumed, saved, strict=True):
        assert len(wholes) == len(expected)
        assert [key for key, value in expected.items() if not torch.equal(wholes[key], value)] == []
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert any(value.abs().max() > 0 for key, value in wholes.items() if key.endswith("exp_avg"))


def _full_state_dict(checkpoint):
    model = workers.compiled("mixtral", FSDP2_TP2, None, ONE)
    compiled_model(model).store.materialize()
    state = models.build("mixtral", **ONE).state_dict()
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def test_a_full_state_dict_is_refused_for_packed_parameters(ranks, checkpoint):
    for kind, message in ranks.errors(_full_state_dict, checkpoint("mixtral", **ONE)):
        assert kind == "UnsupportedError"
        assert "is packed: a rank's shard is several runs" in message


def _hf_writer(checkpoint, folder):
    model = workers.compiled("mixtral", FSDP2_TP2, checkpoint, ONE)
    writer = HuggingFaceStorageWriter(folder, save_distributed=True)
    with pytest.raises(CheckpointException) as error:  # no Exception, so the pool would not catch it
        dcp.save(get_model_state_dict(model), storage_writer=writer)
    return str(error.value)


def test_the_writer_that_keeps_one_part_a_rank_is_refused(ranks, checkpoint, tmp_path):
    for message in ranks(_hf_writer, checkpoint("mixtral", **ONE), str(tmp_path)):
        assert "experts.gate_up_proj is packed: this rank holds 2 parts of it" in message


def _classes(checkpoint):
    model = workers.compiled("mixtral", FSDP2_TP2, checkpoint, ONE)
    parameter = model.get_parameter(PACKED)
    ids = models.token_ids(2, 8)
    for _ in range(2):  # accumulated
        model(input_ids=ids, labels=ids).loss.backward()
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, foreach=True)
    optimizer.step()
    made = [parameter, parameter.detach(), parameter.grad, optimizer.state[parameter]["momentum_buffer"]]
    made += [torch.zeros_like(parameter), parameter.detach().cpu(), parameter.to(torch.bfloat16)]
    in_place = parameter.grad.mul_(2)
    return (
        {type(value).__name__ for value in made},
        in_place is parameter.grad,
        isinstance(parameter, torch.nn.Parameter),
    )


def test_whatever_is_made_of_a_packed_parameter_is_packed(ranks, checkpoint):
    assert ranks(_classes, checkpoint("mixtral", **ONE)) == [({"PackedDTensor"}, True, True)] * 4
