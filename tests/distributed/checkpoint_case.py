"""Save a training state on one mesh, load it on another: what runs on the ranks, and what must be equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import torch
import torch.distributed.checkpoint as dcp
import workers
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedModel
from workers import FSDP4, REPLICATE2_FSDP2, TP2_FSDP2, Layout

import ndcompile

LAYOUTS: dict[str, Layout] = {
    "fsdp4": FSDP4,
    "tp2 x fsdp2": TP2_FSDP2,
    "ep4": (("ep", 4),),
    "dp_replicate2 x fsdp2": REPLICATE2_FSDP2,
    "1 process": (("fsdp", 1),),
    "tp2 x ep4 (8 ranks)": (("fsdp", 2), ("ep", 2), ("tp", 2)),
}
MODELS = ("mixtral", "gpt_oss", "llama")
OVERRIDES = {"num_hidden_layers": 1, "vocab_size": 131, "tie_word_embeddings": True}
"""131 rows are uneven on every mesh. Head and embedding are one tensor, which is saved once."""

State = dict[str, Tensor]


def save(name: str, layout: Layout, checkpoint: str, folder: str) -> State:
    """Save parameters and AdamW state, in DCP and in Hugging Face form; whole, what was saved."""
    model = workers.compiled(name, layout, checkpoint, OVERRIDES)
    optimizer = _optimizer(model)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.25
        optimizer.step()
    dcp.save(_state(model, optimizer), checkpoint_id=str(Path(folder, "dcp")))
    ndcompile.save_pretrained(model, Path(folder, "hf"), "60KB")
    return _whole(model, optimizer)


def load(name: str, layout: Layout, folder: str) -> tuple[State, State]:
    """Whole, what is loaded from DCP's files, and the parameters from the Hugging Face folder."""
    model = workers.compiled(name, layout, None, OVERRIDES)
    ndcompile.init_weights(model, 1)
    optimizer = _optimizer(model)
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=str(Path(folder, "dcp")))
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    from_dcp = _whole(model, optimizer)
    ndcompile.init_weights(model, 1)
    ndcompile.load(model, Path(folder, "hf"))
    return from_dcp, {key: value for key, value in _whole(model, optimizer).items() if key in dict(_tensors(model))}


def differing(saved: State, loaded: tuple[State, State]) -> list[str]:
    """Names that are missing or have other bits, by form."""
    from_dcp, from_hf = loaded
    forms = {"DCP": (saved, from_dcp), "HF": ({key: saved[key] for key in saved if " " not in key}, from_hf)}
    return [
        f"{form}: {key}"
        for form, (expected, found) in forms.items()
        for key in sorted(expected.keys() | found.keys())
        if key not in found or key not in expected or not torch.equal(found[key], expected[key])
    ]


def _optimizer(model: PreTrainedModel) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def _state(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _tensors(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    return list(model.state_dict().items())


def _whole(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> State:
    """Every tensor of the state dict by name, and `<name> <moment>`; collective."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    moments = {
        f"{names[id(parameter)]} {kind}": workers.full(value).clone()
        for parameter, state in optimizer.state.items()
        for kind, value in state.items()
    }
    return {name: workers.full(value).clone() for name, value in _tensors(model)} | moments


def layouts_of(name: str) -> dict[str, Layout]:
    """All layouts, or those without experts."""
    experts = models.on_meta(name, **OVERRIDES).ep_plan
    return {title: layout for title, layout in LAYOUTS.items() if experts or "ep" not in dict(layout)}


def reference(name: str, folder: Path) -> str:
    """Folder of the uncompiled model's checkpoint."""
    if not folder.exists():
        models.build(name, **OVERRIDES).save_pretrained(folder)
    return str(folder)
