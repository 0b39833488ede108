"""Passes of inductor that move and merge collectives: the result is that of the graph as it was written."""

import re

import pytest
import torch
import torch.distributed as dist
import workers
from parity_case import Case, assert_parity, batch
from torch._inductor.utils import fresh_cache, run_and_get_code

import ndcompile
from ndcompile.call import bind
from ndcompile.capture import capture
from ndcompile.compiler import compiled_model
from ndcompile.lower import lower
from ndcompile.pipeline import run_passes
from ndcompile.schedule import SCHEDULING, inductor_settings

COLLECTIVES = (
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)
ONE = {"num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("layout", "disabled"),
    [
        (workers.REPLICATE2_FSDP2, ()),
        (workers.FSDP2_TP2, ()),
        ((("fsdp", 2),), ("bucket_collectives",)),
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


START = re.compile(r"_c10d_functional\.(all_gather_into_tensor|reduce_scatter_tensor)\w*\.default\((\w+)")


def _code(checkpoint):
    """On rank 0, the collectives of the partitioned graphs with their inputs, and inductor's code for both."""
    compiled = compiled_model(workers.compiled("llama", (("fsdp", 2),), checkpoint, ONE))
    if dist.get_rank() != 0:
        return None
    call = bind(compiled.__signature__, (), batch(Case("llama", (("fsdp", 2),)), 0))
    captured = capture(compiled.shadow, compiled.model, call, dynamic=False)
    run_passes(captured, compiled._pass_context(captured))
    with fresh_cache():
        (_, graphs), codes = run_and_get_code(lambda: lower(captured, "inductor", False, ("bucket_collectives",)))
    nodes = [[n for n in g.graph.nodes if n.target in COLLECTIVES] for g in (graphs.forward, graphs.backward)]
    return [[(n.target._opname, n.args[0].name) for n in part] for part in nodes], codes


@pytest.mark.slow  # a minute of C++ compiler, without inductor's cache
def test_overlap_keeps_the_order_of_collectives(world, checkpoint):
    """Ranks with other lengths compile by themselves: they agree on the order because it is the graph's."""
    graphs, codes = world(2)(_code, checkpoint("llama", **ONE))[0]
    assert len(codes) == 2
    for graph, code in zip(graphs, codes, strict=True):
        started = START.findall(code)
        assert len(graph) >= 12
        assert [kind for kind, _ in started] == [kind for kind, _ in graph]
        gathers = [[source for kind, source in order if kind == "all_gather_into_tensor"] for order in (started, graph)]
        assert gathers[0] == gathers[1]
