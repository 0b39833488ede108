"""Passes that move and merge collectives behind inductor's own: the result is that of the graph as it was written."""

import pytest
import workers
from parity_case import Case, assert_parity

import ndcompile
from ndcompile.schedule import SCHEDULING, Schedule

ONE = {"num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("layout", "disabled"),
    [
        (workers.REPLICATE2_FSDP2, ()),
        pytest.param(workers.FSDP2_TP2, (), marks=pytest.mark.slow),
        pytest.param((("fsdp", 2),), ("bucket_collectives",), marks=pytest.mark.slow),
    ],
)
def test_parity(world, checkpoint, layout, disabled):
    options = {"backend": "inductor", "disable_passes": disabled}
    case = Case("llama", layout, padding=True, step=True, overrides=ONE, options=options)
    assert_parity(world(workers.size(layout)), case, checkpoint("llama", **ONE))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(("fsdp", 2),), workers.FSDP2_TP2])
def test_parity_of_layers_compiled_once(world, checkpoint, layout):
    six = {"num_hidden_layers": 6}
    case = Case("llama", layout, padding=True, step=True, overrides=six, options={"backend": "inductor"})
    assert_parity(world(workers.size(layout)), case, checkpoint("llama", **six))


def test_each_pass_can_be_left_out():
    assert Schedule(beside_products="tp").names == tuple(SCHEDULING)
    for name in SCHEDULING:
        assert Schedule([name], "tp").names == tuple(each for each in SCHEDULING if each != name)


def test_matrix_products_are_pipelined_only_over_a_group():
    assert Schedule().names == tuple(each for each in SCHEDULING if each != "pipeline_matmuls")


def test_cached_code_of_other_passes_is_not_used():
    choices = [[], *([name] for name in SCHEDULING)]
    identities = {Schedule(disabled, group).uuid() for disabled in choices for group in ("tp", "other")}
    assert len(identities | {Schedule().uuid()}) == 2 * len(choices) + 1


def test_the_error_of_an_unknown_pass_names_them():
    with pytest.raises(ValueError, match="bucket_collectives"):
        ndcompile.pipeline.check_disabled(["bucketing"])
