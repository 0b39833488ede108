"""Passes that move and merge collectives behind inductor's own: the result is that of the graph as it was written."""

import pytest
import torch
import workers
from parity_case import Case, assert_parity
from torch._subclasses import FakeTensorMode

import ndcompile
from ndcompile.lowering import lower
from ndcompile.lowering.schedule import SCHEDULING, Schedule

ONE = {"num_hidden_layers": 1}
COPIES = {"fsdp": "fsdp.copies"}


def _leave_out_on_cpu(names):
    before, lower.LEFT_OUT_ON_CPU = lower.LEFT_OUT_ON_CPU, names
    return before


@pytest.fixture
def overlapping(world):
    """Worlds whose ranks order collectives as GPUs do. A few steps do not meet gloo's fault."""

    def start(size):
        run = world(size)
        before.append((run, run(_leave_out_on_cpu, ())[0]))
        return run

    before = []
    yield start
    for run, names in before:
        run(_leave_out_on_cpu, names)


@pytest.mark.parametrize(
    ("layout", "disabled"),
    [
        ((("fsdp", 2),), ("bucket_collectives",)),  # so that small weights are gathered together, not as one
        pytest.param(workers.FSDP2_TP2, (), marks=pytest.mark.slow),
        pytest.param(workers.REPLICATE2_FSDP2, (), marks=pytest.mark.slow),
        pytest.param(workers.REPLICATE2_FSDP2, ("bucket_collectives",), marks=pytest.mark.slow),
    ],
)
def test_parity(overlapping, checkpoint, layout, disabled):
    options = {"backend": "inductor", "disable_passes": disabled}
    case = Case("llama", layout, padding=True, step=True, overrides=ONE, options=options)
    assert_parity(overlapping(workers.size(layout)), case, checkpoint("llama", **ONE))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(("fsdp", 2),), workers.FSDP2_TP2])
def test_parity_of_layers_compiled_once(overlapping, checkpoint, layout):
    six = {"num_hidden_layers": 6}
    case = Case("llama", layout, padding=True, step=True, overrides=six, options={"backend": "inductor"})
    assert_parity(overlapping(workers.size(layout)), case, checkpoint("llama", **six))


@pytest.mark.slow
def test_parity_of_ranks_with_other_lengths(overlapping, checkpoint):
    """Their collectives start in one order, or they would pair with others."""
    options = {"backend": "inductor", "disable_passes": ("bucket_collectives",)}
    case = Case("llama", (("fsdp", 2),), ragged=True, overrides=ONE, options=options)
    assert_parity(overlapping(2), case, checkpoint("llama", **ONE))


@pytest.mark.parametrize(
    ("layout", "backend"),
    [(workers.FSDP2_TP2, "aot_eager"), pytest.param((("fsdp", 2),), "inductor", marks=pytest.mark.slow)],
)
def test_parity_of_weights_that_are_kept_for_backward(overlapping, checkpoint, layout, backend):
    kept = {"fsdp_plan": {"model.layers.*": "keep_full_weight"}}
    two = {"num_hidden_layers": 2}
    case = Case("llama", layout, step=True, overrides=two, options={"backend": backend, "distributed_config": kept})
    assert_parity(overlapping(workers.size(layout)), case, checkpoint("llama", **two))


def test_collectives_overlap_on_gpus_only():
    with FakeTensorMode():
        weight, weight_on_gpu = torch.empty(2), torch.empty(2, device="cuda")
    assert lower.left_out([weight, 3]) == lower.LEFT_OUT_ON_CPU
    assert "overlap_communication" in lower.LEFT_OUT_ON_CPU
    assert lower.left_out([weight, weight_on_gpu, 3]) == ()


def test_each_pass_can_be_left_out():
    assert Schedule(beside_products="tp", copies=COPIES).names == tuple(SCHEDULING)
    for name in SCHEDULING:
        assert Schedule([name], "tp", copies=COPIES).names == tuple(each for each in SCHEDULING if each != name)


def test_passes_that_need_groups_run_only_with_some():
    without = {"pipeline_matmuls", "use_copy_engines"}
    assert Schedule().names == tuple(each for each in SCHEDULING if each not in without)


def test_cached_code_of_other_passes_is_not_used():
    choices = [[], *([name] for name in SCHEDULING)]
    groups = [("tp", COPIES), ("other", COPIES), ("tp", {"fsdp": "others"})]
    identities = {Schedule(disabled, tp, copies=fsdp).uuid() for disabled in choices for tp, fsdp in groups}
    assert len(identities | {Schedule().uuid()}) == 3 * len(choices) + 1


def test_the_error_of_an_unknown_pass_names_them():
    with pytest.raises(ValueError, match="bucket_collectives"):
        ndcompile.pipeline.passes_of(["bucketing"])
