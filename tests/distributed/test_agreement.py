"""Ranks agree before the first run of a graph; a rank that differs is an error on every rank, not a hang."""

import datetime
import re
from dataclasses import replace

import models
import pytest
import torch
import torch.distributed as dist
import workers
from workers import FSDP2_TP2, TP2

import ndcompile
from ndcompile.model_calls import compiled_model

ONE = {"num_hidden_layers": 1}
FSDP2 = (("fsdp", 2),)


def _model(layout, **options):
    model = models.build("llama", **ONE)
    return ndcompile.compile(model, workers.mesh(layout), **{"backend": "aot_eager"} | options)


def _step(lengths):
    model = _model(FSDP2)
    losses = []
    for own in lengths[dist.get_rank()]:
        ids = models.token_ids(2, own, seed=own)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
    return losses, workers.full(model.lm_head.weight.grad)


def test_each_rank_may_have_its_own_lengths_from_the_first_step(world):
    """Rank 0 meets its second length while rank 1 repeats its first, so it captures alone."""
    lengths = [[8, 12], [10, 10]]
    results = world(2)(_step, lengths)
    plain = models.build("llama", **ONE)
    for rank, own in enumerate(lengths):
        for length, loss in zip(own, results[rank][0], strict=True):
            ids = models.token_ids(2, length, seed=length)
            expected = plain(input_ids=ids, labels=ids).loss
            (expected / 2).backward()
            assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert workers.error(results[0][1], plain.lm_head.weight.grad) < 1e-5


def _rank_zero_evaluates():
    model, ids = _model(FSDP2), models.token_ids(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    ndcompile.set_agreement_timeout(model, datetime.timedelta(seconds=3))
    if dist.get_rank() == 0:
        model.eval()
        with torch.no_grad():
            model(input_ids=ids)
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()


def test_a_new_signature_on_one_rank_only_releases_the_others(world):
    pool = world(2)
    try:
        (kind, message), (other, released) = pool.errors(_rank_zero_evaluates, timeout=60)
    finally:
        pool.stop()  # its connections are closed
    assert kind == "AgreementError"
    assert "Rank 0 waited 0:00:03 for ranks [1] to reach 'capture2/signature/digest'" in message
    assert "train, eval, no_grad" in message
    assert "grad: False" in message.partition("New in the call of rank 0: ")[2]
    assert other in ("AgreementError", "RuntimeError"), released  # in forward, or in backward as gloo words it
    assert message in released or "closed by peer" in released


def _other_mode():
    model, ids = _model(FSDP2), models.token_ids(2, 8)
    model.train(dist.get_rank() == 0)
    model(input_ids=ids)


def test_two_new_signatures_at_once_name_what_differs(world):
    for kind, message in world(2).errors(_other_mode):
        assert kind == "AgreementError"
        assert re.search(r"Ranks differ in the signature of the call(?s:.*)ranks \[0\]: training: True", message)
        assert "ranks [1]: training: False" in message


def _other_graph():
    model, ids = _model(TP2), models.token_ids(2, 8)
    if dist.get_rank() == 1:  # compile would refuse it
        compiled = compiled_model(model)
        compiled.options = replace(compiled.options, disabled=frozenset(["merge_boundaries"]))
    model(input_ids=ids, labels=ids)


def test_another_graph_names_the_first_differing_node_and_the_ranks(world):
    for kind, message in world(2).errors(_other_graph):
        assert kind == "AgreementError"
        assert "Ranks differ in their collectives, first at number" in message
        assert re.search(r"ranks \[0\]: redistribute over tp \(.*\n  ranks \[1\]: redistribute over tp", message)
        assert "in 'model.layers.0" in message


def _other_model():
    model = models.on_meta("llama", **ONE, intermediate_size=128 + 64 * (dist.get_rank() == 1))
    ndcompile.compile(model, workers.mesh(FSDP2))


def test_another_model_is_refused_at_compile(world):
    for kind, message in world(2).errors(_other_model):
        assert kind == "AgreementError"
        assert re.search(r"ranks \[0\]: model.layers.0.mlp.gate_proj.weight \(128, 64\)", message)
        assert re.search(r"ranks \[1\]: model.layers.0.mlp.gate_proj.weight \(192, 64\)", message)


def _other_inputs(layout):
    model = _model(layout)
    ids = models.token_ids(2, 8, seed=int(dist.get_rank() == 3))
    model(input_ids=ids, labels=models.token_ids(2, 8))


def test_different_inputs_in_a_tp_group_name_the_ranks_and_the_argument(ranks):
    for kind, message in ranks.errors(_other_inputs, FSDP2_TP2):
        assert kind == "AgreementError"
        assert "Ranks [[2], [3]] of one tp group were given different values of" in message
        assert "input_ids" in message
        assert "ndcompile.data_rank(model)" in message


def _other_inputs_later(layout):
    model = _model(layout)
    ndcompile.check_every_input(model)
    same, own = models.token_ids(2, 8), models.token_ids(2, 8, seed=dist.get_rank())
    model(input_ids=same, labels=same)
    model(input_ids=own, labels=same)


def test_inputs_of_every_call_are_compared_on_request(world):
    for kind, message in world(2).errors(_other_inputs_later, TP2):
        assert kind == "AgreementError"
        assert "Ranks [[0], [1]] of one tp group were given different values of" in message


def _other_weights(where):
    torch.manual_seed(dist.get_rank() if where == "random" else 0)
    model = models.build("llama", **ONE) if where != "random" else _random_model()
    if where == "one element" and dist.get_rank() == 1:
        with torch.no_grad():
            model.model.norm.weight[3] += 1e-3
    if where == "buffer" and dist.get_rank() == 0:
        model.model.rotary_emb.inv_freq[0] = 2.0
    ndcompile.compile(model, workers.mesh(FSDP2))


def _random_model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(models.config("llama", **ONE))


@pytest.mark.parametrize(
    ("where", "name", "others"),
    [("one element", "model.norm.weight", 0), ("random", "model.embed_tokens.weight", 8),
     ("buffer", "model.rotary_emb.inv_freq", 0)],
)  # fmt: skip
def test_different_weights_name_the_tensor_the_ranks_and_the_remedy(where, name, others, world):
    for kind, message in world(2).errors(_other_weights, where):
        assert kind == "AgreementError"
        assert re.search(rf"Ranks hold different values of '{name}' \(and {others} more of", message)
        assert re.search(r"ranks \[0\]: \w+, ranks \[1\]: \w+\. Load the same files", message)


def _real_and_meta():
    model = models.build("llama", **ONE) if dist.get_rank() == 0 else models.on_meta("llama", **ONE)
    ndcompile.compile(model, workers.mesh(FSDP2))


def test_real_weights_on_one_rank_and_meta_on_the_other_are_refused(world):
    for kind, message in world(2).errors(_real_and_meta):
        assert kind == "AgreementError"
        assert "Ranks start from different weights: ranks [0]: real, ranks [1]: meta" in message


def _fails_on_one_rank(folder):
    path = folder if dist.get_rank() == 0 else folder + "/nowhere"
    ndcompile.compile(models.on_meta("llama", **ONE), workers.mesh(FSDP2), checkpoint=path)


def test_a_rank_that_cannot_load_ends_the_others_waiting(world, checkpoint):
    (kind, message), (other, cause) = world(2).errors(_fails_on_one_rank, checkpoint("llama", **ONE))
    assert (kind, other) == ("AgreementError", "CheckpointError")
    assert message == f"Rank 0 stops, as rank 1: CheckpointError: {cause}"
