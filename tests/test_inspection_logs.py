"""What the passes tell through torch's own channels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ndcompile.lowering.partition import ON_JOINT_GRAPH
from ndcompile.lowering.schedule import SCHEDULING
from ndcompile.pipeline import pass_names

SCRIPT = """
import models, ndcompile
from ndcompile.lowering.schedule import Schedule
plan = ndcompile.plan(models.config("llama", num_hidden_layers=1), {"tp_size": 2}, seq_len=8)
schedule = Schedule(beside_products="tp", groups=plan.traced.groups, copies={"fsdp": "fsdp.copies"})
schedule(plan.traced.forward.graph)  # as inductor does
"""
NAMES = ["captured", *pass_names(), *ON_JOINT_GRAPH, *SCHEDULING]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The log, and the structured trace."""
    folder = tmp_path_factory.mktemp("trace")
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=Path(__file__).parent,
        env=os.environ | {"TORCH_LOGS": "+ndcompile", "TORCH_TRACE": str(folder)},
        check=True,
    )
    return run.stderr, "".join(file.read_text() for file in folder.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_every_pass_logs_its_graph(told, name):
    assert f"graph after {name}, " in told[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_pass_leaves_a_named_artifact(told, name):
    assert f'"name": "ndcompile_{name}"' in told[1]


def test_the_log_shows_nodes(told):
    assert "redistribute(" in told[0]


def test_nothing_is_logged_unasked():
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=Path(__file__).parent,
        check=True,
    )
    assert "graph after" not in run.stderr
