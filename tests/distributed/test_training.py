"""A compiled model in training: gradients come through autograd as a user of torch expects."""

import models
import pytest
import torch
import workers
from workers import FSDP2_TP2

import ndcompile

ONE = {"num_hidden_layers": 1}
FROZEN = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight")


def _batch(rank, seed=0):
    ids = models.token_ids(2, 8, seed=10 * seed + rank)
    labels = ids.clone()
    labels[0, : 2 + 3 * rank] = -100
    return {"input_ids": ids, "labels": labels}


def _gradients(model):
    return {n: None if p.grad is None else workers.full(p.grad).clone() for n, p in model.named_parameters()}


def _clear(model):
    gradients = _gradients(model)
    model.zero_grad()
    return gradients


def _accumulate(model, loss):
    """Gradients of several ways to accumulate. `loss(seed)` is the loss of a batch."""
    found = {}
    (loss(0) + loss(1)).backward()
    found["two forwards, one backward"] = _clear(model)
    first, second = loss(0), loss(1)
    second.backward()
    first.backward()
    found["two forwards, then two backwards"] = _clear(model)
    loss(0).backward()
    loss(1).backward()
    found["forward and backward twice"] = _clear(model)
    loss(1).backward()
    model.zero_grad(set_to_none=False)
    loss(0).backward()
    loss(1).backward()
    found["after zero_grad(set_to_none=False)"] = _clear(model)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss(0) + loss(1), list(parameters.values()))
    found["autograd.grad"] = {n: workers.full(g) for n, g in zip(parameters, gradients, strict=True)}
    assert all(p.grad is None for p in parameters.values())
    return found


def _hooks(model, loss):
    """What hooks of one parameter see and do."""
    weight, seen = model.lm_head.weight, []
    handles = [
        weight.register_hook(lambda grad: 2 * grad),
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(workers.full(p.grad).clone())),
    ]
    loss(0).backward()
    for handle in handles:
        handle.remove()
    return {"seen": seen, "gradients": _clear(model)}


def _freeze(model, loss):
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    loss(0).backward()
    gradients = _clear(model)
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(True)
    return gradients


def _train(checkpoint):
    model = workers.compiled("llama", FSDP2_TP2, checkpoint, ONE, backend="aot_eager")
    rank = ndcompile.data_rank(model)

    def loss(seed):
        return model(**_batch(rank, seed)).loss

    found = {"accumulate": _accumulate(model, loss), "hooks": _hooks(model, loss), "frozen": _freeze(model, loss)}
    programs = [s.programs[0] for s in ndcompile.model_calls.compiled_model(model).signatures.values()]
    found["reduce-scatters"] = [p.graphs.collective_counts()["backward"]["reduce_scatter_tensor"] for p in programs]
    with torch.no_grad():
        model.eval()
        found["eval"] = model(**_batch(rank)).loss.item()
        found["kinds"] = {type(p.grad).__name__ for p in model.parameters()}
    return found


@pytest.fixture(scope="module")
def results(ranks, checkpoint):
    return ranks(_train, checkpoint("llama", **ONE))


@pytest.fixture(scope="module")
def expected():
    model = models.build("llama", **ONE)

    def loss(seed):
        return sum(model(**_batch(rank, seed)).loss for rank in range(2)) / 2

    return {"accumulate": _accumulate(model, loss), "hooks": _hooks(model, loss), "frozen": _freeze(model, loss)}


def assert_gradients(actual, expected):
    top = max(g.abs().max().item() for g in expected.values() if g is not None)
    for name, gradient in expected.items():
        assert (actual[name] is None) == (gradient is None), name
        if gradient is not None:
            assert workers.error(actual[name], gradient, 1e-3 * top) < workers.LIMIT, name


@pytest.mark.parametrize(
    "way",
    [
        "two forwards, one backward",
        "two forwards, then two backwards",
        "forward and backward twice",
        "after zero_grad(set_to_none=False)",
        "autograd.grad",
    ],
)
def test_gradients_accumulate(way, results, expected):
    for result in results:
        assert_gradients(result["accumulate"][way], expected["accumulate"][way])


def test_a_tensor_hook_changes_the_gradient_and_a_post_accumulate_hook_sees_it(results, expected):
    for result in results:
        assert len(result["hooks"]["seen"]) == 1
        assert_gradients(result["hooks"]["gradients"], expected["hooks"]["gradients"])
        assert torch.equal(result["hooks"]["seen"][0], result["hooks"]["gradients"]["lm_head.weight"])


def test_frozen_parameters_get_no_gradient(results, expected):
    assert expected["frozen"][FROZEN[0]] is None
    for result in results:
        assert_gradients(result["frozen"], expected["frozen"])


def test_frozen_parameters_have_no_reduce_scatter(results):
    """One capture with all 12 parameters, then one with two fewer."""
    for result in results:
        assert result["reduce-scatters"] == [12, 12 - len(FROZEN)]


def test_eval_under_no_grad_gives_the_local_loss(results):
    model = models.build("llama", **ONE).eval()
    for number, result in enumerate(results):
        assert result["eval"] == pytest.approx(model(**_batch(number // 2)).loss.item(), rel=1e-5)
