"""`fsdp_cpu_offload`. There is no device here, so the copies run from host memory to host memory: the graphs are those
of a device but for its name, and what they compute is compared. bench/gpu_offload.py runs them on GPUs."""

import models
import pytest
import torch
import workers
from matrix import sampled
from parity_case import Case, compare_models, step_losses
from torch import nn
from workers import FSDP2_TP2, FSDP4, LIMIT, REPLICATE2_FSDP2

import ndcompile
from ndcompile.capture.call import bind
from ndcompile.capture.capture import capture
from ndcompile.errors import VerifyError
from ndcompile.model_calls import compiled_model
from ndcompile.operators.host_copies import BACK, COPIED, COPY, to_device
from ndcompile.pipeline import run_passes
from ndcompile.verify.verifier import verify

ONE = {"num_hidden_layers": 1}
FSDP2 = (("fsdp", 2),)
FSDP2_EP2 = (("fsdp", 2), ("ep", 2))
OFFLOAD = {"fsdp_cpu_offload": True}


def _offloaded(case, checkpoint):
    """A model whose graphs copy parameters, as on a device."""
    options = {**case.options, "distributed_config": OFFLOAD | case.options.get("distributed_config", {})}
    model = workers.compiled(case.model, case.layout, checkpoint, case.overrides, **options)
    compiled_model(model).offloads = True
    return model


def _compare(case, checkpoint):
    return compare_models(_offloaded(case, checkpoint), models.build(case.model, **case.overrides), case)


def _graphs(model):
    (signature,) = compiled_model(model).signatures.values()
    return signature.programs[0].graphs


def _count(graph, target):
    return len(graph.graph.find_nodes(op="call_function", target=target))


CASES = [
    Case("llama", FSDP2_TP2, padding=True, step=True, overrides=ONE, options={"backend": "aot_eager"}),
    Case("llama", REPLICATE2_FSDP2, overrides=ONE),
    Case("qwen3_moe", FSDP2_EP2, overrides=ONE, options={"backend": "aot_eager"}),
    Case("llama", (("tp", 2),), overrides=ONE, options={"backend": "aot_eager"}),
    Case("llama", FSDP4, overrides=ONE | {"tie_word_embeddings": True, "vocab_size": 131}),
]


@pytest.mark.parametrize(
    "case", sampled(CASES, 0, 2), ids=lambda case: f"{case.model}-{'-'.join(n for n, _ in case.layout)}"
)
def test_parity(world, checkpoint, case):
    for comparison in world(workers.size(case.layout))(_compare, case, checkpoint(case.model, **case.overrides)):
        assert comparison.exceeding(LIMIT) == {}


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("layers", [1, 6])
def test_parity_of_inductors_code(world, checkpoint, layers):
    """Copies that are started ahead, in buckets, and in layers that are compiled once."""
    overrides = {"num_hidden_layers": layers}
    case = Case("llama", FSDP2, step=True, overrides=overrides, options={"backend": "inductor"})
    for comparison in world(2)(_compare, case, checkpoint("llama", **overrides), timeout=600):
        assert comparison.exceeding(LIMIT) == {}


def _copies(layout, checkpoint):
    model = _offloaded(Case("llama", layout, overrides=ONE, options={"backend": "aot_eager"}), checkpoint)
    ids = models.token_ids(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    graphs = _graphs(model)
    counted = [[_count(graph, kind) for kind in (COPY, COPIED, BACK)] for graph in (graphs.forward, graphs.backward)]
    kept = sum(entry.fsdp_style == "keep_full_weight" for entry in model.sharding_plan.parameters)
    return len(model.sharding_plan.parameters), kept, counted


@pytest.mark.parametrize("layout", [FSDP2, (("tp", 2),)])
def test_a_weight_is_copied_once_a_pass_and_its_gradient_once(world, checkpoint, layout):
    """What is kept over fsdp is not copied again in backward; without data axes nothing is kept."""
    for parameters, kept, (forward, backward) in world(2)(_copies, layout, checkpoint("llama", **ONE)):
        again = parameters - 1 - (kept if layout == FSDP2 else 0)  # the embedding's gradient needs no weight
        assert forward == [parameters, parameters, 0]
        assert backward == [again, again, parameters]


def _nothing_kept_of_weights(checkpoint):
    model = _offloaded(Case("llama", (("tp", 2),), overrides=ONE, options={"backend": "aot_eager"}), checkpoint)
    ids = models.token_ids(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    forward = _graphs(model).forward.graph
    shards = {tuple(entry.compute_shape) for entry in model.sharding_plan.parameters if len(entry.shape) == 2}
    shapes = shards | {shape[::-1] for shape in shards}
    return [n.name for n in forward.output_node().all_input_nodes if n.op != "placeholder"
            and tuple(n.meta["val"].shape) in shapes and n.args[0].target is COPIED]  # fmt: skip


def test_a_weight_that_nothing_gathers_is_not_kept_on_the_device(world, checkpoint):
    assert world(2)(_nothing_kept_of_weights, checkpoint("llama", **ONE)) == [[], []]


def _accumulated(layout, checkpoint):
    case = Case("llama", layout, overrides=ONE, options={"backend": "aot_eager"})
    model, reference = _offloaded(case, checkpoint), models.build("llama", **ONE)
    ranks = range(ndcompile.data_world_size(model))
    batches = [
        [{"input_ids": (ids := models.token_ids(2, 8, seed=7 * seed + rank)), "labels": ids} for rank in ranks]
        for seed in range(2)
    ]
    with ndcompile.no_sync(model):
        first = step_losses(model, reference, batches[0])
    second = step_losses(model, reference, batches[1])
    expected = {name: p.grad for name, p in reference.named_parameters()}
    return max(first, second), workers.gradient_errors(model, expected)


@pytest.mark.parametrize("layout", sampled([FSDP2, (("tp", 2),)], 0))
def test_gradients_that_no_sync_holds_are_reduced_before_they_are_copied(world, checkpoint, layout):
    for loss, gradients in world(2)(_accumulated, layout, checkpoint("llama", **ONE)):
        assert loss < LIMIT
        assert max(gradients.values()) < LIMIT


def _mixed(checkpoint):
    """Gathered in bfloat16, stored and copied in float32, with and without copies."""
    results = []
    for offloads in (False, True):
        config = OFFLOAD | {"fsdp_mixed_precision": True}
        model = workers.compiled("llama", FSDP2, checkpoint, ONE, backend="aot_eager", distributed_config=config)
        compiled_model(model).offloads = offloads
        ids = models.token_ids(2, 8, seed=ndcompile.data_rank(model))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.to_local() for p in model.parameters())])
    copied = {
        node.meta["val"].dtype for node in _graphs(model).forward.graph.find_nodes(op="call_function", target=COPY)
    }
    return all(map(torch.equal, *results)), copied, {p.grad.dtype for p in model.parameters()}


def test_mixed_precision_copies_what_is_stored_and_changes_no_bit(world, checkpoint):
    assert world(2)(_mixed, checkpoint("llama", **ONE)) == [(True, {torch.float32}, {torch.float32})] * 2


def _frozen(checkpoint):
    model = _offloaded(Case("llama", FSDP2, overrides=ONE, options={"backend": "aot_eager"}), checkpoint)
    model.model.embed_tokens.requires_grad_(False)
    ids = models.token_ids(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    return model.model.embed_tokens.weight.grad is None, _count(_graphs(model).backward, BACK)


def test_a_frozen_parameter_is_copied_to_the_device_alone(world, checkpoint):
    parameters = len(list(models.on_meta("llama", **ONE).parameters()))
    assert world(2)(_frozen, checkpoint("llama", **ONE)) == [(True, parameters - 1)] * 2


def _budget(checkpoint):
    options = {"backend": "aot_eager", "memory_budget": "70KB"}
    case = Case("llama", FSDP2, overrides=ONE, options=options)
    return compare_models(_offloaded(case, checkpoint), models.build("llama", **ONE), case)


def test_a_memory_budget_recomputes_layers_whose_weights_are_copied(world, checkpoint):
    for comparison in world(2)(_budget, checkpoint("llama", **ONE)):
        assert comparison.exceeding(LIMIT) == {}


def _generated(checkpoint):
    tokens = []
    for offloads in (False, True):
        model = workers.compiled("llama", FSDP2, checkpoint, ONE, distributed_config=OFFLOAD).eval()
        compiled_model(model).offloads = offloads
        settings = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
        tokens.append(model.generate(models.token_ids(1, 6), **settings).tolist())
    return tokens[0] == tokens[1]


def test_generate_gives_the_same_tokens(world, checkpoint):
    assert world(2)(_generated, checkpoint("llama", **ONE)) == [True, True]


def _on_cpus(checkpoint):
    model = workers.compiled("llama", FSDP2, checkpoint, ONE, backend="aot_eager", distributed_config=OFFLOAD)
    ids = models.token_ids(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    return [_count(graph, kind) for graph in (_graphs(model).forward, _graphs(model).backward) for kind in (COPY, BACK)]


def test_a_mesh_of_cpus_needs_no_copies(world, checkpoint):
    assert world(2)(_on_cpus, checkpoint("llama", **ONE)) == [[0, 0, 0, 0]] * 2


def _without_copy(graph, node):
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def _copied_twice(graph, node):
    with graph.inserting_after(node):
        again = graph.call_function(to_device, node.args)
    again.meta.update(node.meta)
    next(iter(node.users)).replace_input_with(node, again)


def _elsewhere(graph, node):
    node.args = (node.args[0], torch.device("meta"))


def _damaged(damage):
    compiled = compiled_model(_offloaded(Case("llama", FSDP2, overrides=ONE), None))
    ids = torch.zeros(2, 8, dtype=torch.int64)
    captured = capture(compiled.shadow, compiled.model, bind(compiled.__signature__, (ids,), {}), dynamic=False)
    context = compiled.pass_context(captured)
    run_passes(captured, context)
    graph = captured.module.graph
    damage(graph, next(n for n in graph.nodes if n.target is to_device and "norm" in n.args[0].meta["input"].name))
    try:
        verify(graph, context)
    except VerifyError as error:
        return str(error)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            _without_copy,
            "is on cpu and used by ['unshard_default",
        ),
        (
            _elsewhere,
            "used by [device(type='meta')], but with offload=True it must be on the host",
        ),
        (_copied_twice, "is averaged over [], but its data axes are"),
    ],
)
def test_the_verifier_finds_a_parameter_that_is_not_copied_once(world, damage, sentence):
    for message in world(2)(_damaged, damage):
        assert "arameter 'model.layers.0.input_layernorm.weight'" in message
        assert sentence in message


def test_copies_have_gradients():
    layer = nn.Linear(3, 3)
    expected = torch.autograd.grad(layer(torch.ones(3)).sum(), layer.weight)[0]
    out = nn.functional.linear(torch.ones(3), to_device(layer.weight, torch.device("cpu")), layer.bias)
    assert torch.equal(torch.autograd.grad(out.sum(), layer.weight)[0], expected)


def _unequal(checkpoint):
    offload = {"fsdp_cpu_offload": torch.distributed.get_rank() == 1}
    workers.compiled("llama", FSDP2, checkpoint, ONE, distributed_config=offload)


def test_ranks_that_differ_about_offload_raise(world, checkpoint):
    for name, message in world(2).errors(_unequal, checkpoint("llama", **ONE)):
        assert name == "AgreementError"
        assert "cpu_offload True" in message
