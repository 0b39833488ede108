"""The signature of a graph: everything besides the arguments that a captured graph is specialised on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def model_state(model: nn.Module) -> tuple[Any, ...]:
    """Modes of the process and flags of the model. A change of any of them captures another graph."""
    parameters = list(model.parameters())
    config: Any = model.config
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple(
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ),
        torch.are_deterministic_algorithms_enabled(),
        tuple(m.training for m in model.modules()),
        checkpointed_layers(model),
        tuple(p.requires_grad for p in parameters),
        tuple(p.dtype for p in parameters),
        getattr(config, "_attn_implementation", None),
        getattr(config, "_experts_implementation", None),
    )


def checkpointed_layers(model: nn.Module) -> tuple[str, ...]:
    """FQNs of the layers that gradient checkpointing is switched on for, in training."""
    if not torch.is_grad_enabled():
        return ()
    return tuple(
        name
        for name, module in model.named_modules()
        if getattr(module, "gradient_checkpointing", False)
        and module.training
        and not any(getattr(child, "gradient_checkpointing", False) for child in list(module.modules())[1:])
    )
