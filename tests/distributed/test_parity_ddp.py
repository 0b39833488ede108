"""fsdp and HSDP give the gradients of plain DistributedDataParallel on the same model and data."""

import models
import pytest
import torch
import workers
from matrix import sampled
from parity_case import Case, batch
from torch.nn.parallel import DistributedDataParallel
from workers import FSDP4, REPLICATE2_FSDP2, error, full, size

import ndcompile

FSDP2 = (("fsdp", 2),)
REPLICATE2 = (("dp_replicate", 2),)


def _against_ddp(layout, folder, overrides):
    """Errors of the gradients, and the number of tensors that are bitwise equal."""
    case = Case("llama", layout, padding=True, overrides=overrides)
    model = workers.compiled("llama", layout, folder, overrides)
    plain = DistributedDataParallel(models.build("llama", **overrides))
    arguments = batch(case, ndcompile.data_rank(model))
    model(**arguments).loss.backward()
    plain(**arguments, use_cache=False).loss.backward()
    expected = {name.removeprefix("module."): p.grad for name, p in plain.named_parameters()}
    top = max(g.abs().max().item() for g in expected.values())
    gradients = {name: full(p.grad) for name, p in model.named_parameters()}
    assert gradients.keys() == expected.keys()
    errors = {name: error(g, expected[name], 1e-3 * top) for name, g in gradients.items()}
    return errors, sum(torch.equal(g, expected[name]) for name, g in gradients.items())


@pytest.mark.parametrize("layout", sampled([FSDP4, REPLICATE2_FSDP2], 1))
def test_gradients_equal_those_of_ddp(world, checkpoint, layout):
    overrides = {"num_hidden_layers": 1, "tie_word_embeddings": layout == FSDP4}
    for errors, _ in world(size(layout))(_against_ddp, layout, checkpoint("llama", **overrides), overrides):
        assert max(errors.values()) < 2e-6, errors


def _gradients(layout, folder, overrides):
    model = workers.compiled("llama", layout, folder, overrides)
    model(**batch(Case("llama", layout, overrides=overrides), ndcompile.data_rank(model))).loss.backward()
    return {name: full(p.grad) for name, p in model.named_parameters()}


def test_fsdp_gradients_are_bitwise_those_of_replicas(world, checkpoint):
    """A sum of two has one order. With DDP itself nothing is bitwise: eager backward kernels sum in another order."""
    overrides = {"num_hidden_layers": 1}
    folder = checkpoint("llama", **overrides)
    sharded = world(2)(_gradients, FSDP2, folder, overrides)
    replicated = world(2)(_gradients, REPLICATE2, folder, overrides)
    for name, gradient in sharded[0].items():
        assert torch.equal(gradient, replicated[0][name]), name
        assert torch.equal(gradient, sharded[1][name]), name
