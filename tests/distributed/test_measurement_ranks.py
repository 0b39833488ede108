"""Rates measured on real ranks: all agree, host names say which ranks are of one node."""

from __future__ import annotations

import dataclasses
import socket
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ndcompile.inspection.rates import PRESETS
from ndcompile.measurement import collectives
from ndcompile.measurement.collectives import KINDS, prepare, wait
from ndcompile.measurement.machine import Machine, machine_of_world, of_first_rank
from ndcompile.measurement.measure import measure_rates

CPU = torch.device("cpu")
LIKE = PRESETS["h100-infiniband"]
BRIEF = 1e-3
"""Seconds of a measurement: the figures are of no use, but they are figures."""


def _machine(hosts):
    with patch.object(socket, "gethostname", lambda: hosts[dist.get_rank()]):
        return machine_of_world(CPU)


def _rates(hosts):
    measured = measure_rates(_machine(hosts), LIKE, BRIEF)
    return dataclasses.asdict(measured.rates), measured.taken, [(s.kind, s.ranks, s.nodes) for s in measured.samples]


def _groups(hosts):
    machine = _machine(hosts)
    return dist.get_process_group_ranks(machine.inside), dist.get_process_group_ranks(machine.between)


def _started(nbytes):
    """Bytes and values of what each kind of collective of two ranks makes of ones."""
    group = dist.new_group([0, 1])
    results = {}
    with patch.object(torch, "zeros", torch.ones):
        for kind in KINDS:
            result = wait(prepare(Machine(CPU, 2, 1, 2), group, kind, nbytes)())
            results[kind] = (result.numel() * 4, result.unique().tolist())
    return results


def _seconds_of_ranks():
    """One rank's call takes ten times as long."""
    machine = _machine("aaaa")
    return machine._slowest(0.01 * (1 + 9 * (dist.get_rank() == 2)))


def _from_first(fails):
    def make():
        if fails:
            raise FileNotFoundError("the folder of rank 0 does not exist")
        return dist.get_rank()

    return of_first_rank(make)


def test_ranks_of_one_node_agree_on_its_link_and_take_the_network_over(ranks):
    results = ranks(_rates, "aaaa")
    rates, taken, samples = results[0]
    assert all(other == results[0] for other in results)
    assert (rates["name"], rates["ranks_a_node"]) == ("4 ranks of CPU on one node (network of h100-infiniband)", 4)
    assert taken == ("network_bandwidth", "network_latency")
    assert {(count, nodes) for _, count, nodes in samples} == {(4, 1)}
    assert 0 < rates["link_bandwidth"] != LIKE.link_bandwidth
    assert rates["network_bandwidth"] == LIKE.network_bandwidth * LIKE.link_fraction


def test_ranks_of_two_nodes_measure_the_link_inside_and_the_network_between(ranks):
    results = ranks(_rates, "aabb")
    rates, taken, samples = results[0]
    assert all(other == results[0] for other in results)
    assert (rates["name"], rates["ranks_a_node"], taken) == ("4 ranks of CPU on 2 nodes", 2, ())
    assert samples == [(kind, 2, nodes) for nodes in (1, 2) for kind in KINDS for _ in collectives.SIZES["cpu"]]


@pytest.mark.slow
def test_one_rank_a_node_measures_the_network_and_takes_the_link_over(ranks):
    rates, taken, samples = ranks(_rates, "abcd")[0]
    assert {(count, nodes) for _, count, nodes in samples} == {(4, 4)}
    assert taken == ("link_bandwidth", "link_latency", "hidden_fraction")
    assert (rates["name"], rates["ranks_a_node"]) == ("4 ranks of CPU on 4 nodes (link of h100-infiniband)", 1)


def test_groups_between_nodes_have_one_rank_of_each(ranks):
    found = ranks(_groups, "aabb")
    assert found == [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]


def test_nodes_with_different_numbers_of_ranks_raise_on_every_rank(ranks):
    errors = ranks.errors(_machine, "abbb")
    assert [name for name, _ in errors] == ["MeshError"] * 4
    assert all("4 ranks are on 2 hosts, in the order ['a', 'b', 'b', 'b']" in message for _, message in errors)


def test_ranks_of_a_node_that_are_no_neighbours_raise_on_every_rank(ranks):
    errors = ranks.errors(_machine, "abab")
    assert all("number those of a host one after the other" in message for _, message in errors)


def test_each_kind_of_collective_is_what_is_timed(world):
    """Of ones, 64 bytes of the larger side: gathers and exchanges move them, the others add those of both ranks."""
    assert world(2)(_started, 64)[0] == {
        "all_gather_into_tensor": (64, [1.0]),
        "reduce_scatter_tensor": (32, [2.0]),
        "all_reduce": (64, [2.0]),
        "all_to_all_single": (64, [1.0]),
    }


def test_the_slowest_rank_counts(ranks):
    assert ranks(_seconds_of_ranks) == [0.1] * 4


def test_what_rank_0_finds_wrong_is_raised_on_every_rank(ranks):
    assert ranks(_from_first, False) == [0] * 4
    errors = ranks.errors(_from_first, True)
    assert errors == [("FileNotFoundError", "the folder of rank 0 does not exist")] * 4
