"""`options` of torch.compile(model, backend="ndcompile") repeat the arguments of ndcompile.prepare, and must agree."""

import os
from pathlib import Path

import models
import pytest
import torch
import workers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.distributed import DistributedConfig

import ndcompile

ONE = {"num_hidden_layers": 1}
FSDP2 = (("fsdp", 2),)
CONFIG = {"fsdp_size": 2, "fsdp_mixed_precision": True}


def _step(model, options):
    """One training step with `options`: the loss, and how far the norm's weight moved."""
    step = torch.compile(model, backend="ndcompile", fullgraph=True, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = workers.full(model.model.norm.weight.detach()).clone()
    ids = models.token_ids(2, 8)
    loss = step(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss.item(), (workers.full(model.model.norm.weight.detach()) - before).abs().max().item()


def _prepared(folder, **options):
    model = models.on_meta("llama", **ONE)
    return ndcompile.prepare(model, checkpoint=folder, lowering="eager", **options)


def _train(folder, spelling):
    """Steps without options, and with options that say the same."""
    mesh = workers.mesh(FSDP2)
    given = {"mesh": mesh, "distributed_config": DistributedConfig(**CONFIG)}
    plain = _step(_prepared(folder, **given), {})
    repeated = given | {"checkpoint": folder}
    if spelling == "other words":  # an equal mesh, a dict, a path
        other = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        repeated = {"mesh": other, "distributed_config": CONFIG, "checkpoint": Path(folder), "disable_passes": []}
    return plain, _step(_prepared(folder, **given), repeated)


@pytest.mark.parametrize("spelling", ["the same objects", "other words"])
def test_options_that_agree_train_as_without_them(world, checkpoint, spelling):
    for plain, repeated in world(2)(_train, checkpoint("llama", **ONE), spelling):
        assert repeated == plain
        assert repeated[1] > 0


def _mesh_of_the_config(folder):
    model = _prepared(folder, distributed_config=DistributedConfig(**CONFIG))
    mesh = ndcompile.init_mesh(DistributedConfig(**CONFIG))
    return _step(model, {"mesh": mesh})


def test_the_mesh_that_the_config_made_agrees(world, checkpoint):
    assert all(moved > 0 for _, moved in world(2)(_mesh_of_the_config, checkpoint("llama", **ONE)))


def _another_mesh():
    return {"mesh": workers.mesh((("tp", 2),))}, ["DeviceMesh((tp=2)", "DeviceMesh((fsdp=2)"]


def _the_ranks_in_another_order():
    mesh = DeviceMesh("cpu", torch.tensor([1, 0]), mesh_dim_names=("fsdp",))
    return {"mesh": mesh}, ["of ranks [1, 0]", "of ranks [0, 1]"]


def _another_config():
    return {"distributed_config": CONFIG | {"fsdp_mixed_precision": False}}, [
        "is DistributedConfig(fsdp_mixed_precision=False)",
        "prepared with DistributedConfig(fsdp_mixed_precision=True)",
    ]


def _another_checkpoint():
    return {"checkpoint": "elsewhere"}, ["'elsewhere'", "llama"]


def _disagreement(folder, other):
    model = _prepared(folder, mesh=workers.mesh(FSDP2), distributed_config=DistributedConfig(**CONFIG))
    options, parts = other()
    with pytest.raises(Exception) as caught:
        torch.compile(model, backend="ndcompile", options=options)(models.token_ids(2, 8))
    return str(caught.value), next(iter(options)), parts


OTHERS = [_another_mesh, _the_ranks_in_another_order, _another_config, _another_checkpoint]


@pytest.mark.parametrize("other", OTHERS, ids=lambda function: function.__name__[1:])
def test_options_that_disagree_are_told_with_both(world, checkpoint, other):
    for message, name, parts in world(2)(_disagreement, checkpoint("llama", **ONE), other):
        assert f"options[{name!r}] of torch.compile is" in message
        assert all(part in message for part in parts), message


def _mode(folder):
    model = _prepared(folder, mesh=workers.mesh(FSDP2))
    with pytest.raises(Exception, match="is one of inductor's own backend"):
        torch.compile(model, backend="ndcompile", mode="reduce-overhead")(models.token_ids(2, 8))


def test_a_mode_of_inductor_is_refused(world, checkpoint):
    world(2)(_mode, checkpoint("llama", **ONE))


def _relative(folder):
    model = _prepared(folder, mesh=workers.mesh(FSDP2))
    return _step(model, {"checkpoint": os.path.relpath(folder)})


def test_a_relative_path_of_the_same_checkpoint_agrees(world, checkpoint):
    assert all(moved > 0 for _, moved in world(2)(_relative, checkpoint("llama", **ONE)))
