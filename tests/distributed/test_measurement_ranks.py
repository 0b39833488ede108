"""Rates measured on real ranks: all agree, and what a launcher says about nodes is used."""

from __future__ import annotations

import dataclasses
import os
from unittest.mock import patch

import torch.distributed as dist

from ndcompile.inspection.rates import PRESETS
from ndcompile.measurement.machine import machine_of_world
from ndcompile.measurement.measure import measure_rates

LIKE = PRESETS["h100-infiniband"]
BRIEF = 1e-3
"""Seconds of a measurement: the figures are of no use, but they are figures."""


def _rates(ranks_a_node):
    with patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks_a_node)):
        machine = machine_of_world("cpu")
    measured = measure_rates(machine, LIKE, BRIEF)
    return dataclasses.asdict(measured.rates), measured.taken, [(s.kind, s.ranks, s.nodes) for s in measured.samples]


def _uneven_nodes():
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="1" if dist.get_rank() == 0 else "3"):
        machine_of_world("cpu")


def test_ranks_of_one_node_agree_on_its_link_and_take_the_network_over(ranks):
    results = ranks(_rates, 4)
    rates, taken, samples = results[0]
    assert all(other == results[0] for other in results)
    assert rates["name"] == "4 ranks of CPU, one node"
    assert taken == ("network_bandwidth", "network_latency")
    assert {(count, nodes) for _, count, nodes in samples} == {(4, 1)}
    assert 0 < rates["link_bandwidth"] != LIKE.link_bandwidth
    assert rates["network_bandwidth"] == LIKE.network_bandwidth * LIKE.link_fraction


def test_ranks_of_two_nodes_measure_the_link_inside_and_the_network_between(ranks):
    results = ranks(_rates, 2)
    rates, taken, samples = results[0]
    assert all(other == results[0] for other in results)
    assert (rates["name"], rates["ranks_a_node"], taken) == ("4 ranks of CPU, 2 nodes", 2, ())
    assert {(count, nodes) for _, count, nodes in samples} == {(2, 1), (4, 2)}
    assert {kind for kind, count, _ in samples if count == 4} == {
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_reduce",
    }


def test_nodes_with_different_numbers_of_ranks_raise_on_every_rank(ranks):
    errors = ranks.errors(_uneven_nodes)
    assert [name for name, _ in errors] == ["MeshError"] * 4
    assert all("LOCAL_WORLD_SIZE is [1, 3, 3, 3] on ranks 0 to 3" in message for _, message in errors)
