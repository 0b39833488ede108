"""Four cases in which transformers 5.24 loads wrong values without a word: here they are right, or refused by name.

Each on every rank of a 2 x 2 mesh (fsdp, tp), because some of them were right on rank 0.
"""

from __future__ import annotations

import pytest
import torch
from loader_support import assert_holds, chunked, coordinates, on_meta, rewrite, tiny_model
from safetensors.torch import load_file
from torch.distributed.tensor import Replicate, Shard

from ndcompile.loader import CheckpointError, Target, load_into
from ndcompile.private.distributed import StridedShard

MESH = (2, 2)
EVERY_RANK = coordinates(MESH)


@pytest.fixture
def saved(tmp_path):
    """A tiny Qwen3-MoE with 4 experts, and its folder."""
    model = tiny_model("qwen3_moe", num_experts=4, num_hidden_layers=1, vocab_size=40)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def targets(model, coordinate, special):
    """Targets of one rank: (Shard(0), Replicate()), and what `special` gives for a part of a name."""
    result = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        placements = next((p for part, p in special.items() if part in name), (Shard(0), Replicate()))
        local = torch.full_like(chunked(tensor, placements, MESH, coordinate), torch.nan, device="cpu")
        result.append(Target(name, local, tensor.shape, placements, MESH, coordinate))
    return result


LAYOUTS = {
    "gate_up whole experts, rows": {"gate_up": (Shard(0), Shard(1))},
    "gate_up packed, then cut again": {"gate_up": (StridedShard(1, split_factor=2), Shard(1))},
    "gate_up hidden, then packed": {"gate_up": (Shard(2), StridedShard(1, split_factor=2))},
    "gate_up packed over tp": {"gate_up": (Shard(0), StridedShard(1, split_factor=2))},
    "experts strided": {"experts": (StridedShard(0, split_factor=2), Shard(0))},
    "q_proj strided twice": {"q_proj": (StridedShard(0, split_factor=4), StridedShard(1, split_factor=4))},
}


@pytest.mark.parametrize("special", LAYOUTS.values(), ids=LAYOUTS)
def test_fused_and_strided_layouts_are_right(saved, special):
    model, folder = saved
    for coordinate in EVERY_RANK:
        held = targets(on_meta(model), coordinate, special)
        load_into(on_meta(model), held, folder)
        assert_holds(held, model.state_dict())


def test_a_checkpoint_without_one_expert_is_refused_on_every_rank(saved):
    model, folder = saved
    rewrite(folder, lambda tensors: {key: value for key, value in tensors.items() if ".experts.1." not in key})
    for coordinate in EVERY_RANK:
        meta = on_meta(model)
        with pytest.raises(CheckpointError) as error:
            load_into(meta, targets(meta, coordinate, {}), folder)
        for lost in ("gate_proj", "up_proj", "down_proj"):
            assert f"model.layers.0.mlp.experts.1.{lost}.weight" in str(error.value)


@pytest.mark.parametrize("shape", [(41, 32), (39, 32), (20, 64)], ids=str)
def test_a_vocabulary_of_another_size_is_refused_on_every_rank(saved, shape):
    model, folder = saved
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": torch.randn(shape)})
    for coordinate in EVERY_RANK:
        meta = on_meta(model)
        held = targets(meta, coordinate, {"lm_head": (Shard(0), Shard(1))})
        with pytest.raises(CheckpointError, match=r"lm_head.weight: checkpoint \(.*\), model \(40, 32\)"):
            load_into(meta, held, folder)
        assert all(target.tensor.isnan().all() for target in held)


def test_missing_tensors_are_refused_and_if_allowed_they_are_alike_on_all_ranks(saved):
    model, folder = saved
    lost = {key for key in load_file(folder / "model.safetensors") if "q_proj" in key or ".mlp.gate." in key}
    rewrite(folder, lambda tensors: {key: value for key, value in tensors.items() if key not in lost})
    slices = {}
    for seed, coordinate in enumerate(EVERY_RANK):
        meta = on_meta(model)
        torch.manual_seed(seed)
        held = targets(meta, coordinate, {})
        with pytest.raises(CheckpointError, match=r"lacks 2 of the .*mlp.gate.weight, .*q_proj.weight"):
            load_into(meta, held, folder)
        load_into(meta, held, folder, strict=False)
        slices[coordinate] = {target.fqn: target.tensor for target in held}
    for name in lost:
        assert torch.equal(slices[0, 0][name], slices[0, 1][name])
        assert torch.equal(slices[1, 0][name], slices[1, 1][name])
        assert not torch.equal(slices[0, 0][name], slices[1, 0][name])
