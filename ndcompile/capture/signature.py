"""The signature of a graph: everything besides the arguments that a captured graph is specialised on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ndcompile.private.transformers import IMPLEMENTATIONS, OUTPUT_FLAGS, configs_of

DEVICES = ("cpu", "cuda")


def model_state(model: nn.Module) -> tuple[Any, ...]:
    """Modes of the process and flags of the model. A change of any of them captures another graph."""
    parameters = list(model.parameters())
    modules = list(model.modules())
    return (
        ("grad", torch.is_grad_enabled()),
        ("inference mode", torch.is_inference_mode_enabled()),
        ("autocast", tuple((d, torch.get_autocast_dtype(d)) for d in DEVICES if torch.is_autocast_enabled(d))),
        ("deterministic", torch.are_deterministic_algorithms_enabled()),
        (
            "training",
            modules[0].training if len({m.training for m in modules}) == 1 else tuple(m.training for m in modules),
        ),
        ("checkpointed layers", checkpointed_layers(model)),
        ("requires_grad", _runs(p.requires_grad for p in parameters)),
        ("dtypes", _runs(p.dtype for p in parameters)),
        *config_state(model),
    )


def config_state(model: nn.Module) -> tuple[tuple[str, Any], ...]:
    """What configs say of the code that runs, and of outputs that a call's arguments do not ask for."""
    configs = [vars(config) for config in configs_of(model)]
    return (
        *((what, _runs(config.get(name) for config in configs)) for what, name in IMPLEMENTATIONS.items()),
        ("outputs", tuple(repr(config.get(name)) for config in configs for name in OUTPUT_FLAGS)),
    )


def describe(key: tuple[Any, ...]) -> list[str]:
    """A signature as lines, for comparison between ranks and for error messages."""
    (names, structure, *leaves), state = key
    lines = [f"arguments {names}", f"structure {structure}"]
    lines += [f"argument {number}: {leaf}" for number, leaf in enumerate(leaves)]
    return lines + [f"{name}: {value}" for name, value in state]


def _runs(values: Iterable[Any]) -> tuple[tuple[Any, int], ...]:
    """Run lengths: short for the usual case that all parameters are alike."""
    return tuple((value, sum(1 for _ in group)) for value, group in itertools.groupby(values))


def layers_of(model: nn.Module) -> tuple[str, ...]:
    """FQNs of the layers that could be recomputed, in order: those that transformers can checkpoint, or, of an ordinary
    module, the members of its outermost lists."""
    modules = dict(model.named_modules())
    able = [name for name, module in modules.items() if hasattr(module, "gradient_checkpointing")]
    innermost = tuple(name for name in able if name and not any(other.startswith(f"{name}.") for other in able))
    if innermost:
        return innermost
    lists = [name for name, module in modules.items() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return tuple(f"{name}.{number}" for name in outermost for number in range(len(modules[name])))


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
