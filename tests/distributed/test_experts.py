"""Expert parallelism on architectures of transformers, against the model on one process."""

import models
import pytest
import torch
import torch.distributed as dist
import workers
from matrix import sampled, sampled_rows
from parity_case import Case, assert_parity, batch, compare_models
from torch._dynamo.utils import counters
from workers import Layout, full, gradient_errors, size

import ndcompile

FSDP2_EP2: Layout = (("ep", 2),)
FSDP4_EP4: Layout = (("ep", 4),)
REPLICATE2_EP2: Layout = (("dp_replicate", 2), ("ep", 2))
FSDP2_TP2_EP2: Layout = (("fsdp", 2), ("ep", 1), ("tp", 2))
FSDP2_TP2_EP4: Layout = (("ep", 2), ("tp", 2))
ALL_AXES: Layout = (("fsdp", 2), ("ep", 2), ("tp", 2))
"""An axis "ep" of a user's mesh holds the ranks of an expert group with batches of their own: ep x tp expert shards."""

# what is particular: qwen2_moe shared experts; deepseek_v3 a dense layer before the MoE one, sigmoid and group-limited
# routing, a correction bias; gpt_oss biases and an interleaved gate. `make parity` runs every model on every layout.
CASES = [
    ("mixtral", REPLICATE2_EP2, 1),
    ("qwen2_moe", FSDP2_TP2_EP4, 1),
    ("deepseek_v3", FSDP2_TP2_EP4, 2),
    ("gpt_oss", FSDP2_TP2_EP4, 1),
]


@pytest.mark.parametrize(("model", "layout", "layers"), sampled_rows(CASES, 0))
def test_one_training_step(world, checkpoint, model, layout, layers):
    overrides = {"num_hidden_layers": layers}
    options = {"backend": "aot_eager"}
    case = Case(model, layout, padding=True, ragged=True, step=True, overrides=overrides, options=options)
    assert_parity(world(size(layout)), case, checkpoint(model, **overrides))


@pytest.mark.slow
def test_eight_ranks_with_all_axes(world, checkpoint):
    """Also uneven: 10 rows of a router over ep_rest=2 x efsdp=2 have padding between the shards."""
    overrides = {"num_hidden_layers": 1, "num_experts": 12, "vocab_size": 130}
    case = Case("olmoe", ALL_AXES, shape=(1, 7), step=True, overrides=overrides)
    assert_parity(world(8), case, checkpoint("olmoe", **overrides))


def _cache_counts():
    """(programs and graphs that could not be cached, programs that were found in the cache)"""
    bypassed = counters["aot_autograd"]["autograd_cache_bypass"] + counters["inductor"]["fxgraph_cache_bypass"]
    return bypassed, counters["aot_autograd"]["autograd_cache_hit"]


def test_one_training_step_through_inductor(world, checkpoint):
    """Its graphs can be cached: one rank compiles, the others and the next start load them."""
    overrides = {"num_hidden_layers": 1}
    case = Case("qwen3_moe", FSDP2_EP2, padding=True, overrides=overrides, options={"backend": "inductor"})
    before = world(2)(_cache_counts)
    assert_parity(world(2), case, checkpoint("qwen3_moe", **overrides))
    after = world(2)(_cache_counts)
    assert [bypassed for bypassed, _ in after] == [bypassed for bypassed, _ in before]
    assert after[1][1] > before[1][1]  # the second rank found what the first one compiled


ONE = {"num_hidden_layers": 1}


def _skewed(layout, experts):
    """gpt_oss with a router that sends every token to the same `experts`."""
    reference = models.build("gpt_oss", **ONE)
    with torch.no_grad():
        reference.model.layers[0].mlp.router.bias[list(experts)] += 100.0
    model = models.build("gpt_oss", **ONE)
    model.load_state_dict(reference.state_dict())
    model = ndcompile.compile(model, workers.mesh(layout), backend="eager")
    return compare_models(model, reference, Case("gpt_oss", layout, overrides=ONE)).exceeding()


def test_all_tokens_to_the_same_experts(ranks):
    """Two of one rank: three ranks have nothing to do."""
    assert ranks(_skewed, FSDP4_EP4, (6, 7)) == [{}] * 4


def _auxiliary(layout, checkpoint):
    """Loss and gradients with the router's auxiliary loss, against that of the full batch."""
    overrides = ONE | {"router_aux_loss_coef": 0.5}
    model = workers.compiled("qwen3_moe", layout, checkpoint, overrides)
    world, rank = ndcompile.data_world_size(model), ndcompile.data_rank(model)
    case = Case("qwen3_moe", layout, shape=(2, 8), padding=True)
    batches = [batch(case, r) for r in range(world)]
    output = model(**batches[rank], output_router_logits=True)
    output.loss.backward()
    reference = models.build("qwen3_moe", **overrides)
    own = [reference(**b, use_cache=False).loss for b in batches]
    whole = {name: torch.cat([b[name] for b in batches]) for name in batches[0]}
    auxiliary = reference(**whole, output_router_logits=True, use_cache=False).aux_loss
    (sum(own) / world + 0.5 * auxiliary).backward()
    errors = gradient_errors(model, {name: p.grad for name, p in reference.named_parameters()})
    return abs(output.aux_loss.item() - auxiliary.item()), max(errors.values())


@pytest.mark.parametrize("layout", sampled([REPLICATE2_EP2, FSDP2_TP2_EP4], 1))
def test_the_auxiliary_loss_is_that_of_the_global_batch(ranks, checkpoint, layout):
    folder = checkpoint("qwen3_moe", **ONE, router_aux_loss_coef=0.5)
    for difference, worst in ranks(_auxiliary, layout, folder):
        assert difference < 1e-6
        assert worst < workers.LIMIT


def _train(layout, checkpoint, steps, kind="foreach"):
    """Losses of every rank, and the norms of the gradient."""
    model = workers.compiled("qwen3_moe", layout, checkpoint, ONE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **{kind: True})
    losses, norms = [], []
    for step in range(steps):
        ids = models.token_ids(2, 12, seed=10 * step + ndcompile.data_rank(model))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norms.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def _train_on_both_layouts(checkpoint):
    return _train(workers.FSDP4, checkpoint, 4), _train(FSDP4_EP4, checkpoint, 4, "fused")


@pytest.mark.slow
def test_ep4_follows_fsdp4_for_four_steps(ranks, checkpoint):
    """huggingface/transformers#45662: there the experts of all ranks became those of rank 0."""
    for (expected, expected_norms), (losses, norms) in ranks(_train_on_both_layouts, checkpoint("qwen3_moe", **ONE)):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert norms == pytest.approx(expected_norms, rel=1e-5), "the norm counts each shard once"


def _dtypes(checkpoint):
    """bf16 and autocast, forward and backward; and evaluation, whose logits the single-process model gives too."""
    ids = models.token_ids(2, 8, seed=dist.get_rank())
    plain = models.build("qwen3_moe", torch.bfloat16, **ONE)
    model = workers.compiled("qwen3_moe", FSDP2_EP2, checkpoint, ONE, torch.bfloat16, backend="aot_eager")
    losses = [m(input_ids=ids, labels=ids, use_cache=False).loss for m in (model, plain)]
    losses[0].backward()
    assert all(full(p.grad).isfinite().all() for p in model.parameters())
    exact = models.build("qwen3_moe", **ONE).eval()
    sharded = workers.compiled("qwen3_moe", FSDP2_EP2, checkpoint, ONE).eval()
    with torch.no_grad():
        difference = workers.error(sharded(input_ids=ids).logits, exact(input_ids=ids, use_cache=False).logits)
    with torch.autocast("cpu", torch.bfloat16):
        automatic = [m(input_ids=ids, labels=ids, use_cache=False).loss.item() for m in (sharded, exact)]
    return [loss.item() for loss in losses], automatic, difference


@pytest.mark.slow
def test_bf16_autocast_and_evaluation(world, checkpoint):
    """Sums in bf16 come in another order: its unit in the last place is 0.4%."""
    for bf16, automatic, difference in world(2)(_dtypes, checkpoint("qwen3_moe", **ONE)):
        assert bf16[0] == pytest.approx(bf16[1], rel=4e-3)
        assert automatic[0] == pytest.approx(automatic[1], rel=4e-3)
        assert difference < workers.LIMIT


def _experts_of(layout, checkpoint):
    """Per expert parameter: (first global expert, values) of this rank."""
    model = workers.compiled("qwen3_moe", layout, checkpoint, ONE)
    mesh = ndcompile.model_calls.compiled_model(model).mesh
    return mesh.coordinate("ep"), {
        name: p.to_local().detach() for name, p in model.named_parameters() if ".experts." in name
    }


def test_every_rank_holds_its_own_experts_of_the_file(ranks, checkpoint):
    expected = dict(models.build("qwen3_moe", **ONE).named_parameters())
    for coordinate, experts in ranks(_experts_of, FSDP4_EP4, checkpoint("qwen3_moe", **ONE)):
        for name, values in experts.items():
            assert torch.equal(values, expected[name][2 * coordinate : 2 * coordinate + 2].detach())


def _under_zero3(checkpoint):
    import os

    flags = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    os.environ.update(flags)
    try:
        return _experts_of(FSDP4_EP4, checkpoint)[1]
    finally:
        for flag in flags:
            del os.environ[flag]


@pytest.mark.slow
def test_the_environment_of_deepspeed_zero3_changes_nothing(ranks, checkpoint):
    """huggingface/transformers#45548: there loading hung and skipped the conversion of keys."""
    folder = checkpoint("qwen3_moe", **ONE)
    for experts, (_, expected) in zip(ranks(_under_zero3, folder), ranks(_experts_of, FSDP4_EP4, folder), strict=True):
        assert all(torch.equal(experts[name], expected[name]) for name in expected)


def _recomputed(checkpoint):
    model = workers.compiled("qwen3_moe", FSDP2_EP2, checkpoint, ONE, backend="aot_eager")
    ids = models.token_ids(2, 12, seed=ndcompile.data_rank(model))
    results = []
    for on in (False, True):
        if on:
            model.gradient_checkpointing_enable()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append((loss.item(), {name: full(p.grad).clone() for name, p in model.named_parameters()}))
        model.zero_grad()
    return results


@pytest.mark.slow
def test_recompute_gives_the_same_gradients(world, checkpoint):
    for (loss, gradients), (loss_again, gradients_again) in world(2)(_recomputed, checkpoint("qwen3_moe", **ONE)):
        assert loss_again == loss
        assert all(torch.equal(gradients_again[name], gradients[name]) for name in gradients)


BAD_LAYOUTS = [
    (
        {"num_experts": 6},
        {"ep_size": 4, "fsdp_size": 4},
        "PlanError",
        r"ep=4 does not divide the 6 experts of .*\[2, 3, 6\]",
    ),
    (
        {},
        {"ep_size": 4, "fsdp_size": 4, "ep_implementation": "all_reduce"},
        "PlanError",
        "needs a group that shares one",
    ),
    (
        {},
        {"ep_size": 4, "fsdp_size": 4, "ep_implementation": "magic"},
        "PlanError",
        "'magic' is not supported. Use one",
    ),
    ({}, {"ep_size": 3, "fsdp_size": 4}, "MeshError", "must divide"),
]


def _compile_with(overrides, config):
    ndcompile.compile(models.on_meta("olmoe", **ONE, **overrides), distributed_config=config)


@pytest.mark.parametrize(("overrides", "config", "kind", "message"), BAD_LAYOUTS)
def test_a_layout_that_the_experts_cannot_have_is_refused(ranks, overrides, config, kind, message):
    import re

    for found, text in ranks.errors(_compile_with, overrides, config):
        assert found == kind
        assert re.search(message, text), text


def _dense():
    config = {"ep_size": 4, "fsdp_size": 4}
    ndcompile.compile(models.on_meta("llama", **ONE), distributed_config=config)


def test_a_model_without_an_ep_plan_is_refused(ranks):
    for kind, message in ranks.errors(_dense):
        assert kind == "PlanError"
        assert "LlamaForCausalLM has no expert-parallel plan, but ep=4. Legal: ep_size=1" in message
