"""Tiny checkpoints and the targets of one rank, for the loader's tests."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ndcompile.loader import Target
from ndcompile.parameters.layout import local_shape
from ndcompile.private.distributed import StridedShard

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXTRAS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 8},
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "apertus": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "gemma3_text": {"sliding_window": 8},
    "ernie4_5_moe": {"moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "phi3": {
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 32,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 2.5, 3.0, 4.0],
        },
    },
    "deepseek_v3": {
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}


def tiny_config(model_type: str, **changes: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **{**SIZES, **EXTRAS[model_type], **changes})


def tiny_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """A model with distinct values everywhere, norms and biases included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def on_meta(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    with torch.device("meta"):
        return type(model)._from_config(model.config, dtype=dtype)


def default_placements(tensor: torch.Tensor) -> tuple[Placement, ...]:
    """Both axes of a 2-D mesh used: rows over the first, columns over the second where there are columns."""
    rows = Shard(0) if tensor.ndim else Replicate()
    return rows, Shard(tensor.ndim - 1) if tensor.ndim > 1 else Replicate()


def targets_of(
    model: PreTrainedModel, mesh_shape: tuple[int, ...] = (1, 1), coordinate: tuple[int, ...] = (0, 0)
) -> list[Target]:
    """A target with fresh memory for every tensor of the state dict, tied ones once."""
    names: dict[int, list[str]] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    targets = []
    for fqn, *aliases in names.values():
        tensor, placements = tensors[fqn], default_placements(tensors[fqn])
        local = torch.empty_like(chunked(tensor, placements, mesh_shape, coordinate), device="cpu")
        targets.append(Target(fqn, local, tensor.shape, placements, mesh_shape, coordinate, tuple(aliases)))
    return targets


def in_memory(target: Target, coordinate: tuple[int, ...]) -> Target:
    """A planned target with memory, of the rank at `coordinate`."""
    shape = local_shape(target.shape, target.placements, target.mesh_shape, coordinate)
    return dataclasses.replace(target, tensor=torch.empty(shape, dtype=target.tensor.dtype), coordinate=coordinate)


def chunked(
    tensor: torch.Tensor, placements: tuple[Placement, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> torch.Tensor:
    """The part of `tensor` at `coordinate`, by torch.chunk alone: the independent reference for layouts."""
    value = tensor.detach()
    for placement, size, index in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, Replicate):
            continue
        dim = placement.dim
        parts = value.chunk(placement.split_factor, dim) if isinstance(placement, StridedShard) else [value]
        held = [chunks[index] for part in parts if index < len(chunks := part.chunk(size, dim))]
        value = torch.cat(held, dim) if held else value.narrow(dim, 0, 0)
    return value


def assert_holds(targets: list[Target], full: dict[str, torch.Tensor]) -> None:
    """Every target holds its part of `full`, bit by bit."""
    for target in targets:
        expected = chunked(full[target.fqn], target.placements, target.mesh_shape, target.coordinate)
        assert torch.equal(target.tensor, expected), target.fqn


def coordinates(mesh_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, mesh_shape)))


def rewrite(folder: Path, change: Any) -> None:
    """Replace the tensors of the single-file checkpoint in `folder` by `change(tensors)`."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def write_sharded(folder: Path, files: dict[str, dict[str, torch.Tensor]], index: dict[str, str] | None = None) -> None:
    """A checkpoint of several files; `index` overrides where the index says the keys are."""
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    weight_map = {key: name for name, tensors in files.items() for key in tensors} if index is None else index
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
