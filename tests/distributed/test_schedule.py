"""Passes of inductor that move and merge collectives: the result is that of the graph as it was written."""

import pytest
import workers
from parity_case import Case, assert_parity

import ndcompile
from ndcompile.schedule import SCHEDULING, inductor_settings

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


def test_each_pass_can_be_left_out():
    for name, settings in SCHEDULING.items():
        assert settings
        assert not set(settings) & set(inductor_settings([name]))
    assert inductor_settings(SCHEDULING) == {}


def test_the_error_of_an_unknown_pass_names_them():
    with pytest.raises(ValueError, match="bucket_collectives"):
        ndcompile.pipeline.check_disabled(["bucketing"])
