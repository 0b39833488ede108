"""What users of transformers pass to a model and make of its outputs, on ranks: the same as in one process."""

import models
import pytest
import torch
import workers
from transformers.distributed import DistributedConfig
from workers import FSDP2_TP2, TP2

import ndcompile

ONE = {"num_hidden_layers": 1}
FSDP2 = (("fsdp", 2),)


def _compiled(layout):
    return ndcompile.compile(models.build("llama", **ONE), workers.mesh(layout), backend="eager")


def _embeddings(data_rank):
    return torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(data_rank))


def _own_loss(model, data_rank):
    logits = model(input_ids=models.token_ids(2, 8, seed=data_rank), use_cache=False).logits
    return logits.float().softmax(-1).square().sum()


def _embeddings_and_positions(model, data_rank):
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return model(
        inputs_embeds=_embeddings(data_rank),
        attention_mask=mask,
        position_ids=positions,
        labels=models.token_ids(2, 8, seed=data_rank),
        use_cache=False,
    ).loss


def _largest_gradient_error(layout, loss_of):
    model, reference = _compiled(layout), models.build("llama", **ONE)
    world = ndcompile.data_world_size(model)
    loss_of(model, ndcompile.data_rank(model)).backward()
    for rank in range(world):
        (loss_of(reference, rank) / world).backward()
    return max(workers.gradient_errors(model, {name: p.grad for name, p in reference.named_parameters()}).values())


@pytest.mark.parametrize("loss_of", [_own_loss, _embeddings_and_positions], ids=lambda f: f.__name__[1:])
def test_gradients_are_those_of_one_process(world, loss_of):
    assert max(world(4)(_largest_gradient_error, FSDP2_TP2, loss_of)) <= workers.LIMIT


def _error_of_the_input_gradient(layout):
    gradients = []
    for model in (_compiled(layout), models.build("llama", **ONE)):
        given = _embeddings(0).requires_grad_()
        model(inputs_embeds=given, labels=models.token_ids(2, 8), use_cache=False).loss.backward()
        gradients.append(given.grad)
    return workers.error(*gradients)


def test_embeddings_that_are_passed_get_their_gradient(world):
    assert max(world(2)(_error_of_the_input_gradient, TP2)) <= workers.LIMIT


def _outputs(layout):
    ids, arguments = models.token_ids(2, 8), {"logits_to_keep": 3, "output_hidden_states": True}
    with torch.no_grad():
        model, reference = _compiled(layout).eval(), models.build("llama", **ONE).eval()
        ours, theirs = model(input_ids=ids, **arguments), reference(input_ids=ids, **arguments)
        assert isinstance(model(input_ids=ids, return_dict=False), tuple)
    pairs = zip((ours.logits, *ours.hidden_states), (theirs.logits, *theirs.hidden_states), strict=True)
    return max(workers.error(a, b) for a, b in pairs), tuple(ours.logits.shape)


def test_logits_to_keep_hidden_states_and_tuples(world):
    for error, shape in world(4)(_outputs, FSDP2_TP2):
        assert error <= workers.LIMIT
        assert shape[:2] == (2, 3)


def _sizes(argument, of_the_model):
    model = models.build("llama", **ONE)
    if of_the_model is not None:
        model.config.distributed_config = of_the_model
    model = ndcompile.compile(model, distributed_config=argument, backend="eager")
    ids = models.token_ids(2, 8)
    logits = model(input_ids=ids).logits.detach()
    sizes = {axis: size for axis, size in model.sharding_plan.sizes.items() if size > 1}
    return sizes, workers.error(logits, models.build("llama", **ONE)(input_ids=ids).logits.detach())


@pytest.mark.parametrize(
    ("argument", "of_the_model", "expected"),
    [
        (DistributedConfig(tp_size=2), None, {"tp": 2}),
        (DistributedConfig(fsdp_size=2), None, {"fsdp": 2}),
        (None, DistributedConfig(fsdp_size=2), {"fsdp": 2}),
        (DistributedConfig(tp_size=2), DistributedConfig(fsdp_size=2), {"tp": 2}),
    ],
    ids=["tp", "fsdp", "of the model", "the argument wins"],
)
def test_a_config_makes_the_mesh(world, argument, of_the_model, expected):
    for sizes, error in world(2)(_sizes, argument, of_the_model):
        assert sizes == expected
        assert error <= workers.LIMIT


def _config_of_the_model_disagrees():
    model = models.build("llama", **ONE)
    model.config.distributed_config = DistributedConfig(fsdp_size=2)
    ndcompile.compile(model, workers.mesh(TP2), backend="eager")


def test_a_config_of_the_model_that_disagrees_with_the_mesh_is_named(world):
    for kind, message in world(2).errors(_config_of_the_model_disagrees):
        assert kind == "MeshError"
        assert "tp=2" in message
        assert "fsdp=2" in message


def _with_axes_of_one():
    return _largest_gradient_error((("dp_replicate", 1), ("fsdp", 1), ("tp", 2)), _own_loss)


def test_axes_of_one_rank_change_nothing(world):
    assert max(world(2)(_with_axes_of_one)) <= workers.LIMIT
