"""Stock optimizers, the gradient norm and what torch cannot do on DTensors."""

import models
import pytest
import torch
import workers
from matrix import sampled
from torch.nn.utils import clip_grad_norm_
from workers import FSDP2_TP2

import ndcompile

SMALL = {"num_hidden_layers": 1, "vocab_size": 131}
"""131 rows are uneven under tp2 and fsdp2. Adam divides by the gradient's size: eps keeps rounding errors small."""
OPTIMIZERS = {
    "foreach AdamW": (torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-4, "foreach": True}),
    "fused AdamW": (torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-4, "fused": True}),
    "foreach SGD": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "foreach": True}),
}


def _batch(rank):
    ids = models.token_ids(2, 8, vocabulary=131, seed=rank)
    return {"input_ids": ids, "labels": ids}


def _train(model, optimizer, loss, clip=None, zero=None):
    norms = []
    for _ in range(2):
        loss().backward()
        norms.append(clip_grad_norm_(model.parameters(), clip or 1e9))
        optimizer.step()
        (zero or optimizer).zero_grad()
    return norms


def _compiled(checkpoint):
    model = workers.compiled("llama", FSDP2_TP2, checkpoint, SMALL)
    return model, lambda: model(**_batch(ndcompile.data_rank(model))).loss


def _plain():
    model = models.build("llama", **SMALL)
    return model, lambda: sum(model(**_batch(rank)).loss for rank in range(2)) / 2


def _values(model):
    return {name: workers.full(parameter.detach()) for name, parameter in model.named_parameters()}


def _two_steps(checkpoint, kind, options, clip):
    model, loss = _compiled(checkpoint)
    norms = _train(model, kind(model.parameters(), **options), loss, clip)
    return _values(model), [workers.full(norm).item() for norm in norms]


def _assert_equal(values, expected):
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("case", sampled(OPTIMIZERS.values(), 0, 1), ids=OPTIMIZERS.keys())
def test_two_clipped_steps_equal_those_of_one_process(case, ranks, checkpoint):
    kind, options = case
    model, loss = _plain()
    norms = _train(model, kind(model.parameters(), **options), loss, clip=0.1)
    for values, own_norms in ranks(_two_steps, checkpoint("llama", **SMALL), kind, options, 0.1):
        assert own_norms == pytest.approx([norm.item() for norm in norms], rel=1e-5)
        assert norms[0] > 0.1, "the clipping must do something"
        _assert_equal(values, dict(model.named_parameters()))


def _fails(checkpoint, kind, options):
    model, loss = _compiled(checkpoint)
    loss().backward()
    parameters = [p for p in model.parameters() if p.ndim == 2]
    try:
        kind(parameters, **options).step()
    except Exception as error:
        return type(error).__name__
    return None


TORCH_LIMITS = {
    "fused SGD": (torch.optim.SGD, {"lr": 0.1, "fused": True}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
}


@pytest.mark.parametrize("case", TORCH_LIMITS.values(), ids=TORCH_LIMITS.keys())
def test_torch_cannot_run_this_optimizer_on_dtensors(case, ranks, checkpoint):
    """When this fails, torch has learned it: take it off the list of limits in README."""
    assert all(ranks(_fails, checkpoint("llama", **SMALL), *case))


def _muon_step(checkpoint):
    model, loss = _compiled(checkpoint)
    loss().backward()
    torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.1, weight_decay=0.0).step()
    return _values(model)


def test_muon_sees_whole_matrices(ranks, checkpoint):
    """It orthogonalises in bf16: rounding moves a step by up to 0.22 of its norm. Shards by themselves (this model's
    halves, row by row) move it by 0.39 or more, so the bound lies between."""
    model, loss = _plain()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    loss().backward()
    torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.1, weight_decay=0.0).step()
    for values in ranks(_muon_step, checkpoint("llama", **SMALL)):
        for name, parameter in model.named_parameters():
            step = (parameter - before[name]).norm().item()
            assert (values[name] - parameter).norm().item() <= 0.3 * step, name


def _two_steps_on_aliases(checkpoint, zero):
    model, loss = _compiled(checkpoint)
    aliases = ndcompile.local_parameters(model)
    optimizer = torch.optim.SGD(aliases, lr=1e-1, momentum=0.9, fused=True)
    _train(model, optimizer, loss, 0.1, model if zero == "model" else None)
    shared = [a.data_ptr() == p.to_local().data_ptr() for a, p in zip(aliases, model.parameters(), strict=True)]
    return _values(model), all(shared)


@pytest.mark.parametrize("zero", sampled(["optimizer", "model"], 0))
def test_fused_sgd_works_on_local_parameters(zero, ranks, checkpoint):
    model, loss = _plain()
    _train(model, torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9), loss, clip=0.1)
    for values, shared in ranks(_two_steps_on_aliases, checkpoint("llama", **SMALL), zero):
        assert shared
        _assert_equal(values, dict(model.named_parameters()))


def _gradients_of_aliases(checkpoint):
    model, loss = _compiled(checkpoint)
    model.lm_head.weight.requires_grad_(False)
    aliases = ndcompile.local_parameters(model)
    assert [alias.grad for alias in aliases] == [None] * len(aliases)
    loss().backward()
    once = [alias.grad.clone() for alias in aliases]
    loss().backward()
    torch.testing.assert_close([alias.grad for alias in aliases], [2 * grad for grad in once])
    return len(list(model.parameters())) - len(aliases)


def test_gradients_of_local_parameters_accumulate_and_frozen_ones_are_left_out(ranks, checkpoint):
    assert ranks(_gradients_of_aliases, checkpoint("llama", **SMALL)) == [1] * 4
