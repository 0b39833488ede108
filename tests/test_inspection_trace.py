"""A training step traced for a plan: without process groups, and with layers that are alike traced once."""

from __future__ import annotations

from collections import Counter

import models
import pytest
import torch.distributed as dist
from transformers.distributed import DistributedConfig

import ndcompile
from ndcompile.capture.shadow import copy_without_weights
from ndcompile.errors import PlanError
from ndcompile.inspection.layers import stack_of
from ndcompile.inspection.mesh_without_ranks import mesh_of_sizes
from ndcompile.inspection.trace import trace
from ndcompile.plans.sharding_plan import build_plan

MESH = {"dp_replicate": 1, "fsdp": 4, "tp": 2, "ep": 1}


def _types(name: str, layers: int) -> dict:
    """Layers of two kinds in turn, where a model has them."""
    return {"layer_types": ["sliding_attention", "full_attention"] * layers} if name == "gemma2" else {}


def _figures(name: str, config: dict, layers: int, whole: bool, checkpointing: bool = False) -> dict:
    """What is scaled from the traced layers."""
    report = ndcompile.plan(
        models.config(name, num_hidden_layers=layers, **_types(name, layers)),
        config,
        batch_size=2,
        seq_len=16,
        whole=whole,
        gradient_checkpointing=checkpointing,
    ).report
    compute = {figure.name: figure.value for figure in report.compute if "FLOPs" in figure.name}
    return {
        "memory": {figure.name: figure.value for figure in report.memory},
        "compute": compute,
        "collectives": {
            (row.kind, row.axis, row.phase, row.purpose): (row.count, row.nbytes) for row in report.collectives
        },
        "boundaries": Counter({(row.module, row.axis, row.source, row.nbytes): row.count for row in report.boundaries}),
    }


@pytest.mark.parametrize(
    ("name", "config", "layers"),
    [
        ("llama", {"fsdp_size": 4, "tp_size": 2}, 3),
        pytest.param("gemma2", {"fsdp_size": 4}, 7, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"fsdp_size": 4, "tp_size": 2, "ep_size": 4}, 3, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"fsdp_size": 2, "ep_size": 2}, 5, marks=pytest.mark.slow),
    ],
)
def test_figures_of_layers_traced_once_equal_those_of_all_layers(name, config, layers):
    assert _figures(name, config, layers, whole=False) == _figures(name, config, layers, whole=True)


def test_of_checkpointed_layers_the_one_before_the_last_stands_for_the_others():
    """The last saves less and computes more again than they."""
    model = models.on_meta("llama", num_hidden_layers=6)
    model.gradient_checkpointing_enable()
    plan = build_plan(copy_without_weights(model), MESH, DistributedConfig())
    assert stack_of(model, plan).counts == {0: 1, 4: 4, 5: 1}
    once, every = (_figures("llama", {"fsdp_size": 4, "tp_size": 2}, 6, whole, True) for whole in (False, True))
    assert once == every


@pytest.mark.parametrize(
    ("name", "layers", "counts"),
    [
        ("llama", 2, {0: 1, 1: 1}),
        ("llama", 6, {0: 1, 5: 5}),
        ("gemma2", 8, {0: 1, 1: 1, 6: 3, 7: 3}),
    ],
)
def test_a_unit_of_layers_that_repeats_is_traced_twice(name, layers, counts):
    model = models.on_meta(name, num_hidden_layers=layers, **_types(name, layers))
    plan = build_plan(copy_without_weights(model), MESH, DistributedConfig())
    assert stack_of(model, plan).counts == counts


def test_layers_with_another_setting_are_not_taken_for_alike():
    model = models.on_meta("llama", num_hidden_layers=6)
    model.model.layers[3].self_attn.scaling = 0.5
    plan = build_plan(models.on_meta("llama", num_hidden_layers=6), MESH, DistributedConfig())
    assert 3 in stack_of(model, plan).counts


def test_no_process_group_is_left_behind():
    before = dist.is_initialized()  # another test's group of one rank may be
    trace(models.on_meta("llama", num_hidden_layers=1), MESH, DistributedConfig(), seq_len=8)
    assert dist.is_initialized() == before


def test_a_step_of_many_ranks_is_traced_while_a_group_of_one_is_running():
    ndcompile.init_mesh(DistributedConfig())
    traced = trace(models.on_meta("llama", num_hidden_layers=1), MESH, DistributedConfig(), seq_len=8)
    assert dist.get_world_size() == 1
    assert traced.mesh.size("fsdp") == 4


def test_the_model_is_left_as_it_is():
    model = models.on_meta("llama", num_hidden_layers=4).eval()
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    ndcompile.plan(model, {"tp_size": 2}, seq_len=8)
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == before
    assert not model.training
    assert len(model.model.layers) == model.config.num_hidden_layers == 4


def test_expert_axes_of_the_mesh_are_those_of_storage():
    mesh = mesh_of_sizes({"dp_replicate": 1, "fsdp": 8, "tp": 2, "ep": 4})
    assert {name: axis.size for name, axis in mesh.axes.items()} == {
        "tp": 2,
        "ep_rest": 2,
        "efsdp": 4,
        "fsdp": 8,
        "ep": 4,
    }
    assert mesh.device_mesh.mesh[:, 0, 0].tolist() == [0, 1]
    assert mesh.device_mesh.mesh[0, :, 0].tolist() == [0, 2]


def test_every_lowered_node_has_a_value_and_a_module():
    traced = trace(models.on_meta("llama", num_hidden_layers=2), MESH, DistributedConfig(), seq_len=8)
    nodes = [node for module in (traced.forward, traced.backward) for node in module.graph.nodes]
    calls = [node for node in nodes if node.op == "call_function"]
    assert len(calls) > 100
    assert not [node for node in calls if "val" not in node.meta or "module" not in node.meta["custom"]]


def test_what_compile_refuses_is_refused():
    with pytest.raises(PlanError, match="tp=3 does not divide"):
        trace(models.on_meta("llama"), MESH | {"tp": 3}, DistributedConfig(), seq_len=8)
