"""Bad input gets a clear error on every rank, before any collective: no rank waits for another."""

import json
import re
import shutil
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
import workers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig
from workers import FSDP2_TP2, TP2

import ndcompile

ONE = {"num_hidden_layers": 1}


def assert_on_all_ranks(errors, kind, *parts):
    for name, message in errors:
        assert name == kind, message
        for part in parts:
            assert re.search(part, message), f"{part!r} is not in: {message}"


def _compile(name, layout, overrides, **options):
    config = options.pop("distributed_config", None)
    config = DistributedConfig(**config) if config is not None else None
    workers.compiled(name, layout, None, ONE | overrides, distributed_config=config, **options)


TP4 = (("tp", 4),)
HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 16}
PLANS = {
    "heads that tp does not divide": (
        "llama", TP4, HEADS, {}, "tp=4 does not divide the 6 heads of 'model.layers.0.self_attn.q_proj'",
        r"Legal tp sizes for LlamaForCausalLM: \[1, 2, 3, 6\]",
    ),
    "KV heads that tp does not divide": (
        "llama", TP4, {}, {}, "tp=4 does not divide the 2 heads of 'model.layers.0.self_attn.k_proj'",
        r"Legal tp sizes for LlamaForCausalLM: \[1, 2\]",
    ),
    "a packed intermediate size that tp does not divide": (
        "llama", TP2, {"intermediate_size": 130}, {"tp_plan": {"model.layers.*.mlp.up_proj": "packed_colwise"}},
        r"'model.layers.0.mlp.up_proj.weight' \(packed_colwise\) has size 130 on dim 0, 2 packed parts of 65",
        r"which tp=2 does not divide. Legal tp sizes for LlamaForCausalLM: \[1\]",
    ),
    "an unknown style": (
        "llama", TP2, {}, {"tp_plan": {"model.layers.*.mlp.up_proj": "colwize"}},
        r"unknown styles \['colwize'\]", "Known styles: .*'colwise'",
    ),
    "a plan that matches nothing": (
        "llama", TP2, {}, {"tp_plan": {"model.blocks.*.mlp.up_proj": "colwise"}},
        "model.blocks", "LlamaForCausalLM",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANS.values(), ids=PLANS.keys())
def test_a_plan_that_cannot_be_applied(case, world):
    name, layout, overrides, config, *parts = case
    options = {"distributed_config": config} if config else {}
    pool = world(workers.size(layout))
    assert_on_all_ranks(pool.errors(_compile_with, name, layout, overrides, options), "PlanError", *parts)


def _compile_with(name, layout, overrides, options):
    _compile(name, layout, overrides, **options)


def _without_plan():
    model = models.on_meta("llama", **ONE)
    model._tp_plan, model.model._tp_plan, model.config.base_model_tp_plan = {}, {}, None
    ndcompile.compile(model, workers.mesh(TP2))


def test_a_model_without_a_plan_under_tp_names_the_class_and_both_remedies(world):
    errors = world(2).errors(_without_plan)
    assert_on_all_ranks(
        errors, "PlanError", "LlamaForCausalLM has no tensor-parallel plan, but tp=2", "tp_plan=", "fsdp"
    )


def _uneven_intermediate_size():
    model = workers.compiled("llama", TP2, None, ONE | {"intermediate_size": 129})
    up, down = (model.get_parameter(f"model.layers.0.mlp.{name}_proj.weight") for name in ("up", "down"))
    return tuple(up.to_local().shape), tuple(down.to_local().shape)


def test_uneven_linears_are_legal(world):
    assert world(2)(_uneven_intermediate_size) == [((65, 64), (64, 65)), ((64, 64), (64, 64))]


def _mesh_case(shape, names, config):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    options = DistributedConfig(**config) if config is not None else None
    ndcompile.compile(models.on_meta("llama", **ONE), mesh, distributed_config=options)


def _part_of_the_world(ranks):
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("fsdp",), _init_backend=False)
    ndcompile.compile(models.on_meta("llama", **ONE), mesh)


@pytest.mark.parametrize(
    ("shape", "names", "config", "part"),
    [
        ((4,), ("data",), None, r"Mesh axes \['data'\] are unknown. Name .* \('dp_replicate', 'fsdp', 'ep', 'tp'\)"),
        ((2, 2), None, None, r"A mesh of shape \(2, 2\) needs mesh_dim_names"),
        ((2, 2), ("fsdp", "tp"), {"tp_size": 4}, "The mesh has .*tp=2.* but distributed_config asks for .*tp=4"),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_fit(shape, names, config, part, ranks):
    assert_on_all_ranks(ranks.errors(_mesh_case, shape, names, config), "MeshError", part)


def test_a_mesh_that_does_not_span_the_world(ranks):
    errors = ranks.errors(_part_of_the_world, [0, 1, 2])
    assert_on_all_ranks(errors, "MeshError", "has 3 ranks, but the world has 4")


def _too_few_ranks():
    ndcompile.compile(models.on_meta("llama", **ONE), distributed_config=DistributedConfig(tp_size=8))


def test_a_config_that_asks_for_more_ranks_than_run(ranks):
    errors = ranks.errors(_too_few_ranks)
    assert_on_all_ranks(errors, "MeshError", r"asks for 8 ranks \(.*tp=8\), but 4 are running")


def _wrapped(how):
    model = models.build("llama", **ONE)
    if how == "fully_shard":
        fully_shard(model, mesh=workers.mesh((("fsdp", 2),)))
    elif how == "fully_shard of a layer":
        fully_shard(model.model.layers[0], mesh=workers.mesh((("fsdp", 2),)))
    else:
        model = DistributedDataParallel(model)
    ndcompile.compile(model, workers.mesh(TP2))


@pytest.mark.parametrize(
    ("how", "part"),
    [("fully_shard", "fully_shard"), ("fully_shard of a layer", "fully_shard"), ("DDP", "DistributedDataParallel")],
)
def test_a_wrapped_model(how, part, world):
    assert_on_all_ranks(world(2).errors(_wrapped, how), "UnsupportedError", part, "Pass the plain")


@pytest.fixture
def broken(checkpoint, tmp_path):
    """A copy of a checkpoint of three files, to be damaged."""
    folder = tmp_path / "checkpoint"
    models.build("llama", **ONE).save_pretrained(folder, max_shard_size="90KB")
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return folder


def _remove_file(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[1]
    file.unlink()
    return re.escape(file.name)


def _remove_key(folder: Path) -> str:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = content["weight_map"].pop("model.norm.weight")
    index.write_text(json.dumps(content))
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / file)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / file)
    return r"model\.norm\.weight"


def _truncate(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-100])
    return re.escape(file.name)


def _other_shape(folder: Path) -> str:
    shutil.rmtree(folder)
    models.build("llama", **ONE, intermediate_size=64).save_pretrained(folder)
    return r"model\.layers\.0\.mlp\.down_proj\.weight"


def _no_folder(folder: Path) -> str:
    shutil.rmtree(folder)
    return re.escape(str(folder))


def _load(folder):
    workers.compiled("llama", FSDP2_TP2, folder, ONE)


@pytest.mark.parametrize("damage", [_remove_file, _remove_key, _truncate, _other_shape, _no_folder])
def test_a_damaged_checkpoint(damage, broken, ranks):
    part = damage(broken)
    assert_on_all_ranks(ranks.errors(_load, str(broken)), "CheckpointError", part)


def _branching():
    model = workers.compiled("llama", TP2, None, ONE)
    original = type(model).forward

    def forward(self, input_ids=None, **kwargs):
        output = original(self, input_ids=input_ids, **kwargs)
        return output if output.logits.sum() > 0 else None

    kind = type("Branching", (type(model),), {"forward": forward})
    other = kind(models.config("llama", **ONE))
    ndcompile.compile(other, workers.mesh(TP2), backend="aot_eager")
    dist.barrier()
    other(input_ids=models.token_ids(2, 8))


def test_a_graph_break_names_its_line(world):
    torch.manual_seed(0)
    errors = world(2).errors(_branching)
    assert_on_all_ranks(errors, "CaptureError", "Branching could not be captured", r"if output\.logits\.sum\(\) > 0")
