"""Dropout over a mesh: alike on what is alike, different on what is different."""

import models
import torch
import torch.distributed as dist
import workers
from workers import FSDP2_TP2

import ndcompile
from ndcompile.model_calls import compiled_model

ONE = {"num_hidden_layers": 1}
RESIDUAL = {"resid_pdrop": 0.1, "attention_dropout": 0.0}
ATTENTION = {"resid_pdrop": 0.0, "attention_dropout": 0.1}


def _hidden_states(checkpoint, overrides):
    """Hidden states of two steps on one input, alike on all ranks."""
    torch.manual_seed(dist.get_rank())  # generators that differ must not matter
    model = workers.compiled("phi3", FSDP2_TP2, checkpoint, ONE | overrides, backend="aot_eager")
    ids = models.token_ids(2, 16)
    with torch.no_grad():
        steps = [model(input_ids=ids, output_hidden_states=True).hidden_states for _ in range(2)]
    return [[state.detach() for state in step] for step in steps], ndcompile.data_rank(model)


def _check(results):
    (first, second), _ = results[0]
    states = {rank: step for rank, ((step, *_), _) in enumerate(results)}
    assert [data_rank for _, data_rank in results] == [0, 0, 1, 1]
    assert not torch.equal(first[-1], second[-1]), "each step draws anew"
    assert all(torch.equal(a, b) for tp in ((0, 1), (2, 3)) for a, b in zip(*(states[r] for r in tp), strict=True))
    assert not torch.equal(states[0][-1], states[2][-1]), "data ranks differ"


def test_residual_dropout_is_bit_equal_over_tp_and_differs_between_data_ranks(ranks, checkpoint):
    _check(ranks(_hidden_states, checkpoint("phi3", **ONE), RESIDUAL))


def test_attention_dropout_leaves_residuals_bit_equal_over_tp(ranks, checkpoint):
    _check(ranks(_hidden_states, checkpoint("phi3", **ONE), ATTENTION))


def _seeds():
    """The seeds that the four ranks feed their graphs: one for invariant values, one for varying ones."""
    model = ndcompile.compile(models.build("phi3", **ONE, **ATTENTION), workers.mesh(FSDP2_TP2), backend="aot_eager")
    compiled = compiled_model(model)
    compiled.seeds.start = 5
    return compiled.seeds.next().tolist()


def test_ranks_of_a_tp_group_share_one_stream_and_have_one_of_their_own(ranks):
    shared, own = zip(*ranks(_seeds), strict=True)
    assert shared[0] == shared[1] != shared[2] == shared[3]
    assert len({*shared, *own}) == 6


def _other_random_operator():
    class Noisy(type(models.build("llama", **ONE))):
        def forward(self, input_ids=None, **kwargs):
            noise = torch.rand_like(self.model.norm.weight)
            output = super().forward(input_ids=input_ids, **kwargs)
            output.logits = output.logits * noise.mean()
            return output

    model = ndcompile.compile(Noisy(models.config("llama", **ONE)), workers.mesh(FSDP2_TP2), backend="aot_eager")
    model(input_ids=models.token_ids(2, 8))


def test_a_random_operator_of_unknown_type_is_an_error(ranks):
    torch.manual_seed(0)
    for kind, message in ranks.errors(_other_random_operator):
        assert kind == "VerifyError", message
        assert "is random, and whether the ranks of a tp group must draw alike is unknown" in message
