"""loss_only: the loss and every gradient are those of the model that returns logits; nobody gets wrong logits."""

import models
import pytest
import torch
import workers
from matrix import sampled
from parity_case import Case, assert_parity, batch
from workers import FSDP2_TP2, FSDP4, TP2

import ndcompile
from ndcompile.errors import UnsupportedError
from ndcompile.model_calls import compiled_model
from ndcompile.operators.chunked_loss import vocabulary_loss

ONE = {"num_hidden_layers": 1}
LOSS_ONLY = {"loss_only": True}
SEVERAL_CHUNKS = (3, 24)
"""72 tokens on a data rank; a chunk has at most 32, half the width of the tiny models."""


def _case(model, layout, **changes):
    given = {"shape": SEVERAL_CHUNKS, "padding": True, "options": LOSS_ONLY, "overrides": ONE}
    return Case(model, layout, **(given | changes))


@pytest.mark.parametrize(
    "case",
    sampled(
        [
            _case("llama", FSDP4, step=True),
            _case("llama", FSDP2_TP2, overrides=ONE | {"vocab_size": 131, "tie_word_embeddings": True}),
            _case("gemma2", FSDP2_TP2, items="int"),  # caps its logits
            _case("qwen2", TP2, overrides=ONE | {"vocab_size": 131}, options=LOSS_ONLY | {"dynamic": True}),
            _case("phi3", FSDP4, ragged=True, options=LOSS_ONLY | {"backend": "aot_eager"}),
            _case("llama", TP2, options=LOSS_ONLY | {"backend": "inductor"}),
            _case("mixtral", TP2, padding=False, overrides=ONE | {"output_router_logits": True}),
        ],
        1,
        2,
        6,
    ),
    ids=lambda case: f"{case.model}-{'x'.join(name + str(size) for name, size in case.layout)}",
)
def test_parity(world, checkpoint, case):
    assert_parity(world(workers.size(case.layout)), case, checkpoint(case.model, **case.overrides))


def _graphs(layout, checkpoint):
    """Shapes of every value of the lowered graphs, and the operators of the captured one."""
    overrides = ONE | {"vocab_size": 160}
    model = workers.compiled("llama", layout, checkpoint, overrides, backend="aot_eager", loss_only=True)
    case = _case("llama", layout, overrides=overrides)
    model(**batch(case, ndcompile.data_rank(model))).loss.backward()
    (signature,) = compiled_model(model).signatures.values()
    (program,) = signature.programs
    graphs = {"forward": program.graphs.forward, "backward": program.graphs.backward}
    values = {name: [n.meta.get("val") for n in graph.graph.nodes] for name, graph in graphs.items()}
    shapes = {name: {tuple(v.shape) for v in vs if isinstance(v, torch.Tensor)} for name, vs in values.items()}
    return shapes, [n.target for n in program.captured.module.graph.nodes].count(vocabulary_loss)


@pytest.mark.parametrize(("layout", "rows"), [((("fsdp", 2),), 160), (TP2, 80)])
def test_logits_of_all_tokens_exist_in_no_graph(world, checkpoint, layout, rows):
    """72 tokens in three chunks of 24; backward has none at all."""
    for shapes, count in world(2)(_graphs, layout, checkpoint("llama", **ONE | {"vocab_size": 160})):
        assert count == 1
        whole = {(*tokens, width) for tokens in ((72,), (3, 24)) for width in (rows, 160)}
        assert (24, rows) in shapes["forward"]
        assert not whole & shapes["forward"]
        assert not (whole | {(24, rows)}) & shapes["backward"]


def _uses_of_logits(checkpoint):
    model = workers.compiled("llama", TP2, checkpoint, ONE, loss_only=True)
    arguments = batch(_case("llama", TP2), 0)
    output = model(**arguments)
    uses = {
        "attribute": lambda: output.logits.shape,
        "index": lambda: output.logits[:, -1],
        "operator": lambda: torch.argmax(output.logits, -1),
        "unpacking": lambda: list(output.logits),
    }
    refused = {}
    for name, use in uses.items():
        try:
            use()
        except UnsupportedError as error:
            refused[name] = str(error)
    keys = list(output.keys())
    try:
        model(**arguments, return_dict=False)
    except Exception as error:
        refused["tuple"] = str(error)
    with torch.no_grad():
        evaluated = model(**arguments).loss
    del arguments["labels"]
    return refused, keys, output.loss.item(), evaluated.item(), model(**arguments).logits.detach()


def test_logits_are_refused_with_labels_and_given_without(world, checkpoint):
    reference = models.build("llama", **ONE)
    arguments = batch(_case("llama", TP2), 0)
    expected = reference(**arguments, use_cache=False)
    for refused, keys, loss, evaluated, logits in world(2)(_uses_of_logits, checkpoint("llama", **ONE)):
        assert set(refused) == {"attribute", "index", "operator", "unpacking", "tuple"}
        assert all("loss_only" in sentence for sentence in refused.values())
        assert keys == ["loss"]
        assert loss == evaluated
        assert abs(loss - expected.loss.item()) < workers.LIMIT * expected.loss.item()
        assert workers.error(logits, expected.logits.detach()) < workers.LIMIT


def _label_outside(checkpoint, label):
    model = workers.compiled("llama", TP2, checkpoint, ONE, loss_only=True)
    arguments = batch(_case("llama", TP2), 0)
    arguments["labels"][1, 5] = label
    try:
        model(**arguments)
    except IndexError as error:
        return str(error)


@pytest.mark.parametrize("label", [128, -1])
def test_a_label_outside_the_vocabulary_raises(world, checkpoint, label):
    for message in world(2)(_label_outside, checkpoint("llama", **ONE), label):
        assert "outside the vocabulary of 128" in message


def _frozen_head(checkpoint):
    model = workers.compiled("llama", TP2, checkpoint, ONE, loss_only=True)
    model.lm_head.weight.requires_grad_(False)
    model(**batch(_case("llama", TP2), 0)).loss.backward()
    return model.lm_head.weight.grad is None, workers.full(model.model.norm.weight.grad)


def test_a_frozen_head_gets_no_gradient(world, checkpoint):
    reference = models.build("llama", **ONE)
    reference(**batch(_case("llama", TP2), 0), use_cache=False).loss.backward()
    for none, gradient in world(2)(_frozen_head, checkpoint("llama", **ONE)):
        assert none
        assert workers.error(gradient, reference.model.norm.weight.grad) < workers.LIMIT
