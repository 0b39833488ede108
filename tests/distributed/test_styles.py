"""Every dense tp style by itself: output and all gradients equal the module's on one process."""

import copy

import pytest
import torch
import workers
from style_units import UNITS, WIDTH, UnitConfig, UnitModel
from transformers.distributed import DistributedConfig
from workers import FSDP2_TP2, TP2, error, gradient_errors

import ndcompile
from ndcompile.plans.styles import STYLES


def _compare(unit, layout, width=WIDTH, length=6, plan=None, options=None):
    """Errors of the output and the gradients, and how many redistributions the graph has."""
    torch.manual_seed(0)
    reference = UnitModel(UnitConfig(unit=unit, width=width)).train()
    model = copy.deepcopy(reference)
    config = DistributedConfig(tp_plan=UNITS[unit].plan if plan is None else plan, fsdp_plan={"": "free_full_weight"})
    model = ndcompile.compile(
        model, workers.mesh(layout), distributed_config=config, **{"backend": "eager"} | (options or {})
    )
    world, rank = ndcompile.data_world_size(model), ndcompile.data_rank(model)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 30, (2, length), generator=generator) for _ in range(world)]
    output = model(batches[rank])
    output.square().mean().backward()
    expected = [reference(ids) for ids in batches]
    (sum(e.square().mean() for e in expected) / world).backward()
    gradients = gradient_errors(model, {name: p.grad for name, p in reference.named_parameters()})
    return {"output": error(output.detach(), expected[rank].detach()), **gradients}


def _assert_equal(pool, *args):
    for errors in pool(_compare, *args):
        over = {name: value for name, value in errors.items() if not value <= workers.LIMIT}
        assert not over


@pytest.mark.parametrize("unit", UNITS)
def test_style(world, unit):
    _assert_equal(world(2), unit, TP2)


@pytest.mark.parametrize("unit", ["packed", "experts", "gathered"])
def test_style_with_fsdp(ranks, unit):
    _assert_equal(ranks, unit, FSDP2_TP2)


@pytest.mark.parametrize("unit", ["mlp", "gathered", "rep", "replicate"])
def test_a_width_that_tp_does_not_divide(world, unit):
    _assert_equal(world(2), unit, TP2, 21)


def test_a_sequence_that_tp_does_not_divide(world):
    _assert_equal(world(2), "sequence_norm", TP2, WIDTH, 7)


def test_all_styles_are_covered():
    used = {style for unit in UNITS.values() for style in unit.plan.values()}
    assert used == set(STYLES)


def test_a_partial_output_is_refused(world):
    """Without the parent's all_reduce the model would return a partial sum."""
    plan = {name: style for name, style in UNITS["packed_input"].plan.items() if style != "all_reduce"}
    for kind, message in world(2).errors(_compare, "packed_input", TP2, WIDTH, 6, plan):
        assert kind == "VerifyError"
        assert "is added to a partial sum: it would be counted once a rank" in message


def test_a_gradient_that_stays_partial_is_refused_when_its_pass_is_disabled(world):
    options = {"disable_passes": ("complete_boundaries",)}
    for unit in ("head_norm_without_rule", "shared_key"):
        for kind, message in world(2).errors(_compare, unit, TP2, WIDTH, 6, None, options):
            assert kind == "VerifyError"
            assert "would be partial" in message
