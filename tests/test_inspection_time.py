"""Seconds of collectives by formula, what overlaps, and the critical path."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from programs import RATES, Program
from torch import fx
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from ndcompile.inspection.kernels import Kernels, is_collective, kernels
from ndcompile.inspection.links import Group, collective_seconds, groups_of
from ndcompile.inspection.mesh_without_ranks import mesh_of_sizes
from ndcompile.inspection.rates import PRESETS
from ndcompile.inspection.scheduled import scheduled
from ndcompile.inspection.time_model import TimeEstimate, collective_times, estimate
from ndcompile.inspection.trace import trace
from ndcompile.mesh import Axis

aten = torch.ops.aten

TP = {"tp": Axis("tp", 4, 0, "g")}


def empty() -> fx.Graph:
    return Program().returns()


def value(result: TimeEstimate, name: str) -> float:
    return next(figure.value for figure in (*result.time, *result.compute) if figure.name == name)


def overlapping(between: int) -> fx.Graph:
    """An all-reduce of 4 MB, 60 ms on four ranks, and `between` kernels of 8 ms before its wait."""
    program = Program()
    x, y = program.input(1000, 1000), program.input(1000, 1000)
    started = program.reduce(x)
    results = [program.call(aten.cumsum.default, y, 0) for _ in range(between)]
    return program.returns(program.wait(started), *results)


def test_gathering_takes_the_bytes_of_the_other_ranks_and_a_step_for_each() -> None:
    seconds = collective_seconds("all_gather_into_tensor", 1e8, Group("fsdp", 4, 1), RATES)
    assert seconds == pytest.approx(3 / 4 * 1e8 / 1e8 + 3 * 1e-6)


def test_an_all_reduce_goes_round_twice() -> None:
    group = Group("tp", 4, 1)
    once = collective_seconds("reduce_scatter_tensor", 1e8, group, RATES)
    assert collective_seconds("all_reduce", 1e8, group, RATES) == pytest.approx(2 * once)


def test_between_nodes_a_ring_uses_the_adapters_of_all_its_ranks_of_a_node() -> None:
    one = collective_seconds("all_gather_into_tensor", 1e8, Group("fsdp", 4, 4), RATES)
    two = collective_seconds("all_gather_into_tensor", 1e8, Group("fsdp", 4, 2), RATES)
    assert one == pytest.approx(3 / 4 * 1e8 / 1e7 + 3 * 1e-5)
    assert two == pytest.approx(3 / 4 * 1e8 / 2e7 + 1e-5 + 2 * 1e-6)


def test_an_all_to_all_is_as_slow_as_what_leaves_the_node() -> None:
    seconds = collective_seconds("all_to_all_single", 1e8, Group("ep", 8, 2), RATES)
    assert seconds == pytest.approx(4 / 8 * 1e8 / 1e7 + 1e-5)


def test_a_group_of_one_takes_no_time() -> None:
    assert collective_seconds("all_reduce", 1e8, Group("tp", 1, 1), RATES) == 0


def test_a_collective_without_a_formula_is_refused() -> None:
    with pytest.raises(ValueError, match="'broadcast' is not known"):
        collective_seconds("broadcast", 1.0, Group("tp", 2, 1), RATES)


def test_tp_neighbours_share_a_node_and_fsdp_crosses_nodes() -> None:
    mesh = mesh_of_sizes({"dp_replicate": 2, "fsdp": 4, "tp": 4, "ep": 1})
    nodes = {group.axis: group.nodes for group in groups_of(mesh.axes, 8).values()}
    assert nodes == {"dp_replicate": 2, "tp": 1, "fsdp": 2}


def test_expert_axes_cross_nodes_as_their_ranks_do() -> None:
    mesh = mesh_of_sizes({"dp_replicate": 1, "fsdp": 8, "tp": 2, "ep": 8})
    nodes = {group.axis: group.nodes for group in groups_of(mesh.axes, 8).values()}
    assert nodes == {"tp": 1, "ep_rest": 1, "ep": 1, "efsdp": 2, "fsdp": 2}


def test_a_tp_group_that_does_not_fit_a_node_spans_two() -> None:
    mesh = mesh_of_sizes({"dp_replicate": 1, "fsdp": 4, "tp": 3, "ep": 1})
    assert groups_of(mesh.axes, 4)["plan.tp"].nodes == 2


def test_communication_that_overlaps_is_not_exposed() -> None:
    result = estimate(overlapping(between=10), empty(), TP, RATES)
    assert value(result, "communication") == pytest.approx(0.06, rel=1e-3)
    assert value(result, "exposed communication") == 0
    assert result.step == pytest.approx(0.08)


def test_communication_that_is_waited_for_at_once_is_exposed() -> None:
    result = estimate(overlapping(between=0), empty(), TP, RATES)
    assert value(result, "exposed share") == pytest.approx(1.0)


def test_kernels_that_are_known_are_not_timed_again() -> None:
    graphs = overlapping(between=2), empty()
    known = Kernels({}, {}), Kernels({}, {})
    assert value(estimate(*graphs, TP, RATES, costs=known), "computation") == 0
    timed = kernels(graphs[0], RATES), kernels(graphs[1], RATES)
    assert estimate(*graphs, TP, RATES, costs=timed) == estimate(*graphs, TP, RATES)


def test_the_part_that_outlasts_the_kernels_is_exposed() -> None:
    result = estimate(overlapping(between=2), empty(), TP, RATES)
    assert value(result, "exposed communication") == pytest.approx(value(result, "communication") - 0.016)


def test_a_collective_starts_behind_the_kernels_before_it() -> None:
    program = Program()
    x, y = program.input(1000, 1000), program.input(1000, 1000)
    before = program.call(aten.cumsum.default, y, 0)
    result = estimate(program.returns(before, program.wait(program.reduce(x))), empty(), TP, RATES)
    assert result.step == pytest.approx(0.008 + value(result, "communication"))


def test_collectives_follow_each_other() -> None:
    program = Program()
    started = [program.reduce(program.input(1000, 1000)) for _ in range(2)]
    result = estimate(program.returns(*map(program.wait, started)), empty(), TP, RATES)
    assert result.step == pytest.approx(0.12, rel=1e-3)


def test_hidden_communication_inside_a_node_takes_its_part_from_kernels() -> None:
    rates = dataclasses.replace(RATES, hidden_fraction=0.5)
    half_hidden = estimate(overlapping(between=4), empty(), TP, rates)
    assert value(half_hidden, "lost to hidden communication") == pytest.approx(0.5 * 0.032)
    assert half_hidden.step == pytest.approx(value(half_hidden, "communication") + 0.5 * 0.032)


def test_communication_between_nodes_or_that_is_exposed_takes_nothing_from_kernels() -> None:
    for between, ranks_a_node in ((10, 2), (0, 8)):
        rates = dataclasses.replace(RATES, ranks_a_node=ranks_a_node, hidden_fraction=0.5)
        plain = dataclasses.replace(rates, hidden_fraction=0.0)
        graph = overlapping(between)
        assert estimate(graph, empty(), TP, rates).step == estimate(graph, empty(), TP, plain).step


def test_a_slower_link_lengthens_an_exposed_step_by_the_formula() -> None:
    slow = dataclasses.replace(RATES, link_bandwidth=5e7)
    graph = overlapping(between=0)
    longer = estimate(graph, empty(), TP, slow).step - estimate(graph, empty(), TP, RATES).step
    assert longer == pytest.approx(2 * 3 / 4 * 4e6 * (1 / 5e7 - 1 / 1e8))


def test_a_slower_link_does_not_lengthen_a_step_that_hides_it() -> None:
    slower = dataclasses.replace(RATES, link_bandwidth=9e7)
    graph = overlapping(between=10)
    assert estimate(graph, empty(), TP, slower).step == estimate(graph, empty(), TP, RATES).step


def test_the_optimizer_follows_and_takes_its_bytes() -> None:
    result = estimate(empty(), overlapping(between=0), TP, RATES, optimizer_bytes=7_000_000)
    assert value(result, "optimizer") == pytest.approx(0.007)
    assert result.step == pytest.approx(0.067, rel=1e-3)


def test_steps_of_the_critical_path_are_kinds_of_work_in_their_modules() -> None:
    program = Program()
    x = program.input(1000, 1000)
    first = program.call(aten.cumsum.default, x, 0, module="layers.0.q_proj")
    second = program.call(aten.cumsum.default, first, 0, module="layers.0.k_proj")
    result = estimate(program.returns(program.wait(program.reduce(second))), empty(), TP, RATES)
    assert [(step.what, step.module) for step in result.critical_path] == [
        ("compute", "layers.0"),
        ("all_reduce over tp", ""),
    ]


@pytest.fixture(scope="module")
def traced():
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return trace(model, {"dp_replicate": 1, "fsdp": 2, "tp": 2, "ep": 1}, DistributedConfig(), batch_size=2, seq_len=32)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_critical_path_s_seconds_sum_to_the_step(traced, preset: str) -> None:
    result = estimate(*scheduled(traced), traced.mesh.axes, PRESETS[preset])
    assert sum(step.seconds for step in result.critical_path) == pytest.approx(result.step)


def test_every_collective_of_the_lowered_graphs_has_its_seconds(traced) -> None:
    graphs = traced.forward.graph, traced.backward.graph
    seconds = [collective_times(graph, traced.mesh.axes, RATES) for graph in graphs]
    assert [set(each) for each in seconds] == [set(filter(is_collective, graph.nodes)) for graph in graphs]
    total = sum(sum(each.values()) for each in seconds)
    assert total == pytest.approx(value(estimate(*graphs, traced.mesh.axes, RATES), "communication"))


def test_operations_of_a_model_are_six_a_parameter_and_token(traced) -> None:
    """Of the weights that multiply, on a rank with half of each and half of the tokens."""
    result = estimate(*scheduled(traced), traced.mesh.axes, RATES)
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128
    assert value(result, "FLOPs of matrix products") == 6 * (6 * layer + 64 * 256) / 2 * 2 * 32
