"""Values that no checkpoint holds: parameters that are missing from it, and buffers that are not saved.

transformers computes both in `_init_weights`. Here it runs on a shadow of the model, in which every other tensor is a
meta tensor marked as initialised, so that nothing of the real model can change.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from ndcompile.errors import UnsupportedError
from ndcompile.loader.catalog import CheckpointError
from ndcompile.loader.target import Target
from ndcompile.private.transformers import guard_torch_init_functions


def initialize_missing(model: PreTrainedModel, targets: Sequence[Target], seed: int = 0) -> None:
    """Fill `targets` with what `model._init_weights` gives them, the same on every rank and mesh.

    Each tensor is made whole on the CPU, one at a time, from random numbers that depend on its FQN and `seed` alone;
    then this rank's part is copied. Raises CheckpointError if the model does not initialise a tensor.
    """
    if not targets:
        return
    shadow = _shadow(model)
    for target in targets:
        value = _initial_value(shadow, target, seed)
        if value is None:
            raise CheckpointError(
                f"{target.fqn} has no value: no checkpoint has it, and {type(model).__name__}._init_weights gives none"
            )
        target.fill(value)


def _initial_value(shadow: PreTrainedModel, target: Target, seed: int) -> torch.Tensor | None:
    """The global tensor that `_init_weights` makes for `target`, or None; `shadow` is as before afterwards."""
    old = {name: shadow.get_parameter_or_buffer(name) for name in target.names}
    value = _unset(target.shape, target.tensor.dtype)
    if isinstance(old[target.fqn], nn.Parameter):
        value = nn.Parameter(value, requires_grad=False)
    for name in target.names:
        _place(shadow, name, value)
    try:
        # A tied tensor may be initialised under any of its names; the module of the first that does it decides.
        for name in target.names:
            with _reproducible(f"{seed} {target.fqn}"):
                for module, parent in _ancestors(shadow, name.rpartition(".")[0]):
                    parent._init_weights(module)
            made = shadow.get_parameter_or_buffer(name).detach()
            if not _is_unset(made):
                return made
        return None
    finally:
        for name, tensor in old.items():
            _place(shadow, name, tensor)


def materialize_buffers(model: PreTrainedModel, device: torch.device | str) -> None:
    """Replace every buffer of `model` that is on the meta device by its initial value on `device`, in its dtype.

    Parameters and buffers with real values stay as they are. A persistent buffer which `_init_weights` leaves alone is
    NaN (or zero) until a checkpoint fills it. Raises UnsupportedError naming a non-persistent buffer without a value.
    """
    waiting = {fqn: old for fqn, old in model.named_buffers(remove_duplicate=False) if old.is_meta}
    if not waiting:
        return
    shadow = _shadow(model)
    values = {id(old): _unset(old.shape, old.dtype) for old in waiting.values()}
    for fqn, old in waiting.items():
        _place(shadow, fqn, values[id(old)])
    with _reproducible("buffers"):
        shadow.initialize_weights()
    # Read back: an init function may put a new tensor in place of the old one.
    made = {id(old): shadow.get_buffer(fqn).detach().to(device) for fqn, old in waiting.items()}
    for fqn, old in waiting.items():
        owner, _, name = fqn.rpartition(".")
        module = model.get_submodule(owner)
        if name in module._non_persistent_buffers_set and _is_unset(made[id(old)]):
            name = type(model).__name__
            raise UnsupportedError(f"buffer {fqn} is not saved and {name}._init_weights gives it no value")
        module._buffers[name] = made[id(old)]


def _shadow(model: PreTrainedModel) -> PreTrainedModel:
    """The modules of `model`, copied, with doubles for tensors; configs and other attributes are shared."""
    modules: dict[int, nn.Module] = {}
    doubles: dict[int, torch.Tensor] = {}

    def double(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        return doubles.setdefault(id(tensor), _double(tensor))

    def clone(module: nn.Module | None) -> nn.Module | None:
        if module is None or id(module) in modules:
            return None if module is None else modules[id(module)]
        copied = modules[id(module)] = module.__class__.__new__(module.__class__)
        copied.__dict__.update(module.__dict__)
        # Without the mark, or the model's own construction would count as done.
        copied.__dict__.pop("_is_hf_initialized", None)
        copied.__dict__["_parameters"] = {name: double(tensor) for name, tensor in module._parameters.items()}
        copied.__dict__["_buffers"] = {name: double(tensor) for name, tensor in module._buffers.items()}
        copied.__dict__["_modules"] = {name: clone(child) for name, child in module._modules.items()}
        return copied

    return clone(model)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor like `tensor`, marked so that transformers' init functions pass it by."""
    double = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        double = nn.Parameter(double, requires_grad=False)
    double._is_hf_initialized = True  # type: ignore[attr-defined]
    return double


def _place(model: nn.Module, fqn: str, tensor: torch.Tensor) -> None:
    """Put `tensor` at `fqn`, without the checks of attribute assignment."""
    owner, _, name = fqn.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(tensor, nn.Parameter):
        module._parameters[name] = tensor
    else:
        module._buffers[name] = tensor


def _ancestors(model: PreTrainedModel, owner: str) -> list[tuple[nn.Module, PreTrainedModel]]:
    """The module `owner` and its ancestors up to the model, each with the nearest model around it.

    This is the order of `initialize_weights`: an outer module's `_init_weights` may set an inner parameter again.
    """
    module, parent = model, model
    path = [(module, parent)]
    for name in filter(None, owner.split(".")):
        module = module.get_submodule(name)
        parent = module if isinstance(module, PreTrainedModel) else parent
        path.append((module, parent))
    return path[::-1]


@contextlib.contextmanager
def _reproducible(name: str) -> Iterator[None]:
    """Random numbers of the CPU that depend on `name` alone; the generator is as before afterwards."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"), guard_torch_init_functions():
        torch.default_generator.manual_seed(seed)
        yield


def _unset(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor whose values show whether anything was written, where the dtype has such a value."""
    value = torch.zeros(shape, dtype=dtype, device="cpu")
    return value.fill_(torch.nan) if dtype.is_floating_point else value


def _is_unset(value: torch.Tensor) -> bool:
    return value.is_floating_point() and value.numel() > 0 and bool(value.isnan().all())
