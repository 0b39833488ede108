"""Initial weights of a model that is trained from scratch: the same on every mesh."""

import re

import models
import torch
import torch.distributed as dist
import workers
from workers import FSDP2_TP2, FSDP4, REPLICATE2_FSDP2

import ndcompile

UNEVEN = {"num_hidden_layers": 1, "vocab_size": 131, "tie_word_embeddings": True}


def _initial(name, layouts, seed):
    wholes = []
    for layout in layouts:
        model = workers.compiled(name, layout, None, UNEVEN)
        ndcompile.init_weights(model, seed)
        wholes.append({key: workers.full(value) for key, value in model.state_dict().items()})
    return wholes


def test_every_mesh_starts_from_the_same_weights(ranks):
    layouts = [FSDP4, FSDP2_TP2, REPLICATE2_FSDP2]
    results = ranks(_initial, "llama", layouts, 7)
    expected = results[0][0]
    for wholes in results:
        for whole in wholes:
            assert all(torch.equal(whole[name], value) for name, value in expected.items())


def test_the_distribution_is_that_of_the_model_and_layers_differ(ranks):
    ((first,), *_), ((other,), *_) = (
        ranks(_initial, "mixtral", [(("ep", 4),)], 0),
        ranks(_initial, "mixtral", [FSDP4], 1),
    )
    scale = models.config("mixtral").initializer_range
    for name, value in first.items():
        if value.ndim > 1:
            assert 0.9 * scale < value.std() < 1.1 * scale, name
            assert not torch.equal(value, other[name]), name
        else:
            assert torch.equal(value, torch.ones_like(value)), name
    gates = first["model.layers.0.self_attn.q_proj.weight"], first["model.layers.0.self_attn.o_proj.weight"]
    assert not torch.equal(*gates)


def _other_seed():
    ndcompile.init_weights(workers.compiled("llama", FSDP4, None, UNEVEN), dist.get_rank() // 3)


def test_ranks_with_another_seed_are_named(ranks):
    for kind, message in ranks.errors(_other_seed):
        assert kind == "AgreementError"
        assert re.search(r"Ranks differ in the seed of init_weights.*ranks \[3\]: seed 1", message, re.DOTALL)
