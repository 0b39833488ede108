"""The zoo: a tiny configuration of each of 190 causal language models of transformers 5.24, their layouts and batches.

`configs.json` maps a model type to its configuration: hidden size 64, 4 heads, 2 KV heads, vocabulary 128, and
as many layers as it takes to have every kind of layer of the type, at least 3 where it has fewer kinds.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from models import perturb
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from workers import FSDP2_TP2, FSDP4, REPLICATE2_FSDP2, TP2, Layout

from ndcompile.errors import PlanError
from ndcompile.plans.sharding_plan import build_plan

CONFIGS = Path(__file__).parent / "configs.json"
EVAL_MODE = Path(__file__).parent / "eval_mode.json"
REPAIRS = Path(__file__).parent / "repairs.json"

LAYOUTS: dict[str, Layout] = {
    "fsdp4": FSDP4,
    "replicate2_fsdp2": REPLICATE2_FSDP2,
    "tp2": TP2,
    "tp4": (("tp", 4),),
    "fsdp2_tp2": FSDP2_TP2,
    "fsdp4_ep4": (("ep", 4),),
    "fsdp2_tp2_ep2": (("fsdp", 2), ("ep", 1), ("tp", 2)),
}
"""An axis "ep" of a mesh holds the ranks of an expert group with batches of their own: ep x tp expert shards."""

ROWS = {**LAYOUTS, "fsdp2_tp2, 3 seeds, padding": FSDP2_TP2}
"""What the table has rows for: the layouts with one seed, and one with more and rows that end in padding."""

SEQUENCE = 16
"""Longer than the windows and chunks of the configurations, which are 8."""
TOKENS = range(5, 96)
"""Ids without a meaning of their own: special tokens are below 5, image and audio tokens from 96."""
IGNORED = -100


@functools.cache
def configs() -> dict[str, dict[str, Any]]:
    """Model type -> configuration."""
    return json.loads(CONFIGS.read_text())


def types() -> list[str]:
    return list(configs())


@functools.cache
def repairs() -> dict[str, dict[str, Any]]:
    """Model type -> {"why", and "plan" or "config"}: the shortest override with which a refused type compiles."""
    return json.loads(REPAIRS.read_text())


@functools.cache
def eval_mode() -> dict[str, str]:
    """Model types that are compared in eval mode, and why: two runs of one of them in train mode differ."""
    return json.loads(EVAL_MODE.read_text())


def build(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """The single-process model, the same at every call, in train mode if it can be; perturbed."""
    torch.manual_seed(0)
    return perturb(_from_config(model_type, torch.float32, changes)).to(dtype).train(model_type not in eval_mode())


def on_meta(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """The model without memory, in train mode."""
    with torch.device("meta"):
        return _from_config(model_type, dtype, changes).train(model_type not in eval_mode())


def _from_config(model_type: str, dtype: torch.dtype, changes: dict[str, Any]) -> PreTrainedModel:
    values = configs()[model_type] | changes
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def batch(rows: int, data_rank: int, seed: int = 0, padding: bool = False) -> dict[str, Tensor]:
    """The arguments of one data rank's call. Every data rank ignores another number of labels.

    padding: the last row ends in padding, of another length on every data rank.
    """
    generator = torch.Generator().manual_seed(1000 * seed + data_rank)
    ids = torch.randint(TOKENS.start, TOKENS.stop, (rows, SEQUENCE), generator=generator)
    labels = ids.clone()
    labels[0, : 2 + 2 * data_rank] = IGNORED
    arguments = {"input_ids": ids, "labels": labels}
    if padding:
        mask = torch.ones_like(ids)
        mask[-1, SEQUENCE - 3 - data_rank :] = 0
        labels[mask == 0] = IGNORED
        arguments["attention_mask"] = mask
    return arguments


def layouts_of(model_type: str) -> list[str]:
    """Every type has an FSDP plan; tp and ep need one of transformers, and tp=4 also heads that 4 divides."""
    model = on_meta(model_type)
    plans = {"tp": bool(model.tp_plan), "ep": bool(model.ep_plan)}
    able = [name for name, layout in LAYOUTS.items() if all(has for plan, has in plans.items() if plan in dict(layout))]
    return [name for name in able if name != "tp4" or _divides(model, 4)]


def _divides(model: PreTrainedModel, tp: int) -> bool:
    try:
        build_plan(model, {"dp_replicate": 1, "fsdp": 1, "ep": 1, "tp": tp}, DistributedConfig())
    except PlanError:
        return False
    return True
