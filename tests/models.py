"""Tiny models for tests, from the configurations in `zoo_configs`, and batches for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

CONFIGS = Path(__file__).parent / "zoo_configs"


def config(name: str, **overrides: Any) -> PretrainedConfig:
    """A tiny configuration: hidden size 64, 4 heads, 2 KV heads, 3 layers, vocabulary 128."""
    values = json.loads((CONFIGS / f"{name}.json").read_text()) | overrides
    if "num_hidden_layers" in overrides and values.get("layer_types"):
        values["layer_types"] = values["layer_types"][: overrides["num_hidden_layers"]]
    return AutoConfig.for_model(values.pop("model_type"), **values)


def build(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """The single-process model, the same at every call, in train mode."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(name, **overrides), dtype=torch.float32)
    return perturb(model).to(dtype).train()


def on_meta(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """The model without memory, in train mode."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config(name, **overrides), dtype=dtype).train()


def bench_config(kind: str, layers: int) -> PretrainedConfig:
    """The models of bench/train.py in bfloat16: Llama-3-8B ("dense") and Qwen3-30B-A3B ("moe") widths."""
    if kind == "dense":
        sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
        return LlamaConfig(num_attention_heads=32, num_hidden_layers=layers, dtype=torch.bfloat16, **sizes)
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_key_value_heads": 4, "vocab_size": 151936}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128}
    return Qwen3MoeConfig(num_attention_heads=32, num_hidden_layers=layers, dtype=torch.bfloat16, **sizes, **experts)


def perturb(model: PreTrainedModel) -> PreTrainedModel:
    """Give constant parameters (norm scales of 1, biases of 0) distinct values.

    An error in how one is sharded or reduced would otherwise hide behind a trivial value.
    """
    generator = torch.Generator().manual_seed(1234)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.numel() > 1 and parameter.std() == 0:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def token_ids(batch: int, sequence: int, vocabulary: int = 128, seed: int = 0) -> Tensor:
    """Random token ids, with those at both ends of every shard of a vocabulary on two ranks among them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, vocabulary, (batch, sequence), generator=generator)
    half = vocabulary // 2
    ends = torch.tensor([0, half - 1, half, half + 1, vocabulary - 1])
    ids[-1, 1:6] = ends[: sequence - 1]  # as many as a short sequence has room for
    return ids
