"""A call refused on one rank ends on all of them, soon and with its reason; refused on all, training goes on."""

import datetime

import models
import pytest
import torch
import torch.distributed as dist
import workers
from matrix import sampled, sampled_rows
from torch import nn
from workers import FSDP2_TP2, TP2

import ndcompile

ONE = {"num_hidden_layers": 1}
FSDP2 = (("fsdp", 2),)
LAST = 1
"""The rank that has nothing left."""
PATIENCE = datetime.timedelta(seconds=4)
"""The one that refuses gives up after half of it."""
FRONT_ENDS = pytest.mark.parametrize("dynamo", [False, True])


def _model(layout, dynamo):
    model = workers.compiled("llama", layout, None, ONE, dynamo=dynamo)
    ndcompile.init_weights(model, 0)
    return model


def _step(model, batch):
    ids = models.token_ids(batch, 8)[:batch] if batch else torch.zeros(0, 8, dtype=torch.int64)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item()


def _empty_on_one(layout, dynamo, before):
    model = _model(layout, dynamo)
    ndcompile.set_agreement_timeout(model, PATIENCE)
    for _ in range(before):
        _step(model, 2)
    _step(model, 0 if dist.get_rank() == LAST else 2)


def _told(pool, function, *args):
    """What every rank raised, of a pool whose connections are closed behind it."""
    try:
        return pool.errors(function, *args, timeout=40)
    finally:
        pool.stop()


def _assert_told(world, layout, call, *args, reason="Empty input"):
    """All ranks end well before the time-out of collectives, and name the rank and the reason."""
    errors = _told(world(workers.size(layout)), call, layout, *args)
    for rank, (kind, message) in enumerate(errors):
        assert reason in message
        if rank != LAST:
            assert f"rank {LAST}: " in message
            assert "AgreementError" in kind + message


@pytest.mark.parametrize(("before", "dynamo"), sampled_rows([(0, False), (1, True), (0, True), (1, False)], 0, 1))
def test_an_empty_batch_on_one_rank_ends_all(world, before, dynamo):
    """The others wait in the agreement on a graph, or, where there is one, in its first collective."""
    _assert_told(world, FSDP2, _empty_on_one, dynamo, before)


def test_ranks_without_a_group_with_it_end_too(world):
    _assert_told(world, FSDP2_TP2, _empty_on_one, False, 1)


def _outside_of_the_vocabulary_on_one(layout, dynamo):
    model = _model(layout, dynamo)
    ndcompile.set_agreement_timeout(model, PATIENCE)
    _step(model, 2)
    ids = models.token_ids(2, 8)
    if dist.get_rank() == LAST:
        ids[0, 0] = 1_000_000
    try:
        model(input_ids=ids).logits.sum().backward()
    except Exception:
        with pytest.raises(ndcompile.NdcompileError, match=f"left its process groups: rank {LAST}: IndexError"):
            _step(model, 2)
        raise


def _outside_of_the_vocabulary_on_all(layout):
    model = _model(layout, False)
    losses, ids = [_step(model, 2)], models.token_ids(2, 8)
    ids[0, 0] = 1_000_000
    with pytest.raises(IndexError):
        model(input_ids=ids)
    return [*losses, _step(model, 2)]


def test_after_an_error_inside_a_graph_on_all_ranks_training_goes_on(world):
    for first, again in world(2)(_outside_of_the_vocabulary_on_all, FSDP2):
        assert again == first


def _one_has_begun_a_collective_more():
    model = _model(FSDP2, False)
    _step(model, 2)
    if dist.get_rank() == LAST:
        dist.all_reduce(torch.ones(1), group=model.model.norm.weight.device_mesh.get_group(), async_op=True)
    with pytest.raises(ValueError, match="Empty input"):
        _step(model, 0)
    _step(model, 2)


def test_ranks_that_stop_at_different_collectives_do_not_go_on(world):
    errors = _told(world(2), _one_has_begun_a_collective_more)
    assert all("left its process groups: rank" in message for _, message in errors)


@pytest.mark.parametrize("dynamo", sampled([False, True], 0))
def test_an_error_of_one_rank_inside_a_graph_ends_all(world, dynamo):
    _assert_told(world, FSDP2, _outside_of_the_vocabulary_on_one, dynamo, reason="index out of range")


def _empty_on_all(dynamo):
    model = _model(FSDP2, dynamo)
    losses = [_step(model, 2)]
    for _ in range(2):
        with pytest.raises(Exception, match="Empty input"):
            _step(model, 0)
    return [*losses, _step(model, 2)]


def _wrong_arguments(fullgraph):
    model = models.build("llama", **ONE)
    ndcompile.prepare(model, workers.mesh(FSDP2), lowering="eager")
    ndcompile.init_weights(model, 0)
    step = torch.compile(model, backend="ndcompile", fullgraph=fullgraph)
    ids = models.token_ids(2, 8)
    losses = [step(input_ids=ids, labels=ids).loss.item()]
    for arguments, message in (
        ({"input_ids": ids, "inputs_embeds": torch.zeros(2, 8, 64)}, "ValueError: You must specify exactly one of"),
        ({"input_ids": ids[:0]}, "Empty input: argument 'input_ids'"),
        ({"input_ids": ids, "use_cache": True}, "no key-value cache"),
    ):
        with pytest.raises(ndcompile.NdcompileError, match=message):
            step(**arguments)
        losses.append(step(input_ids=ids, labels=ids).loss.item())
    return losses


@pytest.mark.parametrize("fullgraph", [False, True])
def test_torch_compile_says_why_a_call_is_refused_and_takes_the_next(world, fullgraph):
    for losses in world(2)(_wrong_arguments, fullgraph):
        assert len(set(losses)) == 1


@FRONT_ENDS
def test_after_an_empty_batch_on_all_ranks_training_goes_on(world, dynamo):
    for first, again in world(2)(_empty_on_all, dynamo):
        assert again == first


def _another_option_on_one():
    model = models.build("llama", **ONE)
    ndcompile.prepare(model, workers.mesh(FSDP2), lowering="eager")
    ndcompile.set_agreement_timeout(model, PATIENCE)
    options = {"lowering": "inductor"} if dist.get_rank() == LAST else {}
    torch.compile(model, backend="ndcompile", options=options)(models.token_ids(2, 8))


def test_options_that_disagree_on_one_rank_end_all(world):
    pool = world(2)
    try:
        errors = pool.errors(_another_option_on_one, timeout=40)
    finally:
        pool.stop()
    assert all("options['lowering'] of torch.compile is 'inductor'" in message for _, message in errors)


def _replaced_on_one():
    model = _model(FSDP2, False)
    ndcompile.set_agreement_timeout(model, PATIENCE)
    _step(model, 2)
    if dist.get_rank() == LAST:
        model.model.norm.weight = torch.nn.Parameter(torch.ones(64))
    _step(model, 2)


def test_a_parameter_replaced_on_one_rank_ends_all(world):
    pool = world(2)
    try:
        errors = pool.errors(_replaced_on_one, timeout=40)
    finally:
        pool.stop()
    assert all("model.norm.weight" in message for _, message in errors)


class Small(nn.Module):
    """Looks tokens up before any collective, and refuses long sequences."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.up, self.down = nn.Embedding(16, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids):
        if ids.shape[1] > 16:
            raise ValueError("too long")
        return self.down(self.up(self.tokens(ids)).relu())


def _small(layout):
    plan = {"up": "colwise", "down": "rowwise"} if layout == TP2 else {}
    model = ndcompile.compile(Small(), workers.mesh(layout), distributed_config={"tp_plan": plan}, backend="eager")
    ndcompile.set_agreement_timeout(model, PATIENCE)
    return model


def _ids(length, first=0):
    return torch.tensor([[first, *range(1, length)]]) % 16 if first < 16 else torch.full((1, length), first)


def _in_different_calls():
    """The last rank ends its first call behind its collectives, the other begins its second one."""
    model = _model(FSDP2, False)
    ndcompile.set_agreement_timeout(model, PATIENCE)
    ids, wrong = models.token_ids(2, 8), models.token_ids(2, 8)
    wrong[0, 3] = 5_000
    with torch.no_grad():
        if dist.get_rank() == LAST:
            with pytest.raises(IndexError):
                model(input_ids=ids, labels=wrong)
        else:
            model(input_ids=ids, labels=ids)
            with pytest.raises(ValueError, match="Empty input"):
                model(input_ids=ids[:0])
        model(input_ids=ids, labels=ids)


def test_ranks_that_stop_in_different_calls_do_not_go_on(world):
    assert all("left its process groups: rank" in message for _, message in _told(world(2), _in_different_calls))


def _before_and_behind_the_seeds():
    """One call, and no collective: but the graph of the last rank has drawn its seeds."""
    model = _small(TP2)
    model(_ids(4))
    with pytest.raises((IndexError, ValueError)):
        model(_ids(4, first=99) if dist.get_rank() == LAST else _ids(4)[:0])
    model(_ids(4))


def test_ranks_of_which_one_has_begun_its_graph_do_not_go_on(world):
    errors = _told(world(2), _before_and_behind_the_seeds)
    assert all("left its process groups: rank" in message for _, message in errors)


def _fails_in_backward():
    model = _model(FSDP2, False)
    ndcompile.set_agreement_timeout(model, PATIENCE)
    _step(model, 2)
    ids = models.token_ids(2, 8)
    loss = model(input_ids=ids, labels=ids).loss
    if dist.get_rank() == LAST:
        loss.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    else:
        loss.backward()
    _step(model, 2)


def _all_fail_in_backward():
    model = _model(FSDP2, False)
    losses, ids = [_step(model, 2)], models.token_ids(2, 8)
    loss = model(input_ids=ids, labels=ids).loss
    loss.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    return [*losses, _step(model, 2)]


def test_after_an_error_in_backward_on_all_ranks_training_goes_on(world):
    for first, again in world(2)(_all_fail_in_backward):
        assert again == first


def test_a_rank_whose_backward_failed_does_not_run_again(world):
    errors = _told(world(2), _fails_in_backward)
    assert "an error ended the backward of an earlier call" in errors[LAST][1]
    assert "closed by peer" in errors[0][1]


def _too_long_on_one():
    model = _small(FSDP2)
    for length in (8, 10):
        model(_ids(length)).sum().backward()
    model(_ids(20 if dist.get_rank() == LAST else 10)).sum().backward()


def test_a_further_size_that_one_rank_refuses_ends_all(world):
    assert all("too long" in message for _, message in _told(world(2), _too_long_on_one))


def _one_of_two_models():
    first, second = _small(FSDP2), _small(FSDP2)
    for model in (first, second):
        model(_ids(4))
    if dist.get_rank() == LAST:
        first(_ids(4)[:0])
    for _ in range(2):
        second(_ids(4))


def test_a_refused_call_of_one_model_is_told_to_others_on_its_mesh(world):
    assert all("Empty input" in message for _, message in _told(world(2), _one_of_two_models))


class SaysSizes(Small):
    def forward(self, ids):
        if ids.shape[1] > 10:
            raise ValueError("too long", ids.shape[1])
        return super().forward(ids)


def _symbolic_sizes_in_the_reason():
    model = ndcompile.prepare(SaysSizes(), workers.mesh(FSDP2), lowering="eager")
    step = torch.compile(model, backend="ndcompile", dynamic=True)
    step(_ids(8))
    with pytest.raises(ndcompile.NdcompileError, match="ValueError: too long, 12"):
        step(_ids(12))
    step(_ids(9))


def test_torch_compile_says_the_size_that_is_refused(world):
    world(2)(_symbolic_sizes_in_the_reason)
