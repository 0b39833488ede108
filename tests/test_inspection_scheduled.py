"""The order in which a plan's step runs: all layers, and the passes that a GPU's graphs go through."""

from __future__ import annotations

from collections import Counter

import models
import pytest
from matrix import sampled_rows
from transformers.distributed import DistributedConfig

import ndcompile
from ndcompile.inspection.all_layers import with_all_layers
from ndcompile.inspection.kernels import is_collective, is_wait, name_of
from ndcompile.inspection.scheduled import PASSES, scheduled
from ndcompile.inspection.source import model_of
from ndcompile.inspection.trace import trace
from ndcompile.lowering.schedule import SCHEDULING, WITH_GROUPS

ONE = {"dp_replicate": 1, "fsdp": 1, "tp": 1, "ep": 1}

CASES = [
    ("llama", {"fsdp": 4, "tp": 2}, {}),
    ("llama", {"dp_replicate": 2, "fsdp": 2}, {}),
    ("gemma2", {"fsdp": 4}, {"layer_types": ["sliding_attention", "full_attention"] * 3}),
    ("deepseek_v3", {"fsdp": 4, "tp": 2, "ep": 4}, {}),  # writes into slices, which autograd undoes outside of modules
    ("qwen3_moe", {"fsdp": 4, "tp": 2, "ep": 4}, {}),
]


def traced_step(name: str, sizes: dict[str, int], whole: bool = False, **overrides):
    model = models.on_meta(name, num_hidden_layers=6, **overrides)
    return trace(model, ONE | sizes, DistributedConfig(), batch_size=2, seq_len=16, whole=whole, proven=False)


@pytest.mark.parametrize(("name", "sizes", "overrides"), sampled_rows(CASES, 0))
def test_the_graphs_of_layers_traced_once_become_those_of_all_layers(name, sizes, overrides):
    once, every = (traced_step(name, sizes, whole, **overrides) for whole in (False, True))
    for backward, graph in ((False, every.forward.graph), (True, every.backward.graph)):
        built = with_all_layers(once, backward)
        built.lint()
        assert _described(built) == _described(graph)


def _described(graph) -> Counter:
    """The calls with their modules and what they read, but constants: layers share those, and copies have their own."""
    return Counter(
        (name_of(n), (n.meta.get("custom") or {}).get("module"), tuple(map(name_of, n.all_input_nodes)))
        for n in graph.nodes
        if n.op == "call_function" and n.all_input_nodes
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes", "overrides"), CASES)
def test_the_time_of_layers_traced_once_is_that_of_all_layers(name, sizes, overrides):
    model = models.on_meta(name, num_hidden_layers=6, **overrides)
    config = {f"{axis}_size": size for axis, size in sizes.items()}
    once, every = (
        {f.name: f.value for f in ndcompile.plan(model, config, batch_size=2, seq_len=16, whole=whole).report.time}
        for whole in (False, True)
    )
    assert once == pytest.approx(every, rel=5e-3)


def test_the_passes_are_those_of_the_schedule_but_four():
    left_out = (*WITH_GROUPS, "coalesce_collectives", "reuse_layers")
    assert list(PASSES) == [name for name in SCHEDULING if name not in left_out]


def test_a_layer_s_weights_are_gathered_while_the_layer_before_runs():
    forward, _ = scheduled(traced_step("llama", {"fsdp": 2}))
    nodes = list(forward.nodes)
    starts = [n for n in nodes if is_collective(n)]
    under_way = [nodes[nodes.index(n) : nodes.index(next(u for u in n.users if is_wait(u)))] for n in starts[1:]]
    assert all(any(name_of(other) == "mm" for other in between) for between in under_way[1:])


def test_a_bucket_ends_with_its_layer():
    forward, _ = scheduled(traced_step("llama", {"fsdp": 2}))
    gathers = sum(is_collective(node) for node in forward.nodes)
    assert gathers >= 6  # weights so small would be one bucket


@pytest.mark.slow
def test_a_weight_takes_a_few_nodes_however_many_ranks_hold_it():
    """Rows that do not divide take some views more. A node for each shard would be four times as many in all."""
    few, many = (traced_step("qwen3_moe", {"fsdp": size, "ep": 4}) for size in (16, 256))
    assert len(many.forward.graph.nodes) < 1.3 * len(few.forward.graph.nodes)
    assert len(many.backward.graph.nodes) < 1.3 * len(few.backward.graph.nodes)


def test_disabled_passes_do_not_run():
    model = models.on_meta("llama", num_hidden_layers=6)
    arguments = {"batch_size": 2, "seq_len": 16, "proven": False, "disabled": tuple(PASSES)}
    step = trace(model, ONE | {"fsdp": 2}, DistributedConfig(), **arguments)
    for node in scheduled(step)[0].nodes:
        assert not is_collective(node) or is_wait(node.next)


@pytest.fixture(scope="module")
def dense() -> dict[str, dict[str, float]]:
    """Figures of the step of bench/train.py, 8 layers on fsdp=2, with and without the passes of the schedule."""
    model = model_of(models.bench_config("dense", 8))
    report = ndcompile.plan(model, {"fsdp_size": 2}, batch_size=2, seq_len=4096, rates="h200-nvlink").report
    return {figure.name: figure.value for figure in report.time}


def test_gathers_and_reductions_of_fsdp_are_mostly_hidden(dense):
    """Measured with loss_only: 2.6 ms of a step of 222.4 (docs/speed.md)."""
    assert 0.001 < dense["exposed communication"] < 0.004
    assert dense["step"] == pytest.approx(0.2224, rel=0.1)


def test_the_estimate_of_hidden_communication_reaches_its_bound_but_for_both_ends(dense):
    assert dense["step"] - dense["step, all hidden"] - dense["lost to hidden communication"] < 0.005
