"""What a compiled model refuses, by name, in one sentence each."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from ndcompile.errors import UnsupportedError
from ndcompile.mesh import BOTH, backend_of
from ndcompile.private.transformers import input_gradient_hooks

_logger = logging.getLogger("ndcompile.offload")

METHODS = {
    "__reduce_ex__": "A compiled model cannot be copied or pickled. Copy the model before ndcompile.compile; save its "
    "state_dict() with torch.distributed.checkpoint.",
    "generate": "generate() needs a key-value cache, which a prepared model does not have. Use ndcompile.compile.",
    "push_to_hub": "push_to_hub() would upload from every rank. Call save_pretrained(folder) on all ranks, then "
    "huggingface_hub.upload_folder(folder_path=folder, repo_id=...) on one.",
    "resize_token_embeddings": "resize_token_embeddings() changes parameters. Resize, then call ndcompile.compile.",
    "add_adapter": "add_adapter() adds parameters. Add adapters first, then call ndcompile.compile.",
}

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "OptimizedModule")


def refuse_methods(model: nn.Module) -> None:
    """Make the methods that cannot work raise their sentence."""
    for name, sentence in METHODS.items():
        if hasattr(model, name):
            setattr(model, name, _raiser(sentence))
    model.hf_device_map = _RefusedDeviceMap()  # type: ignore[assignment]


class _RefusedDeviceMap(Mapping):
    """Trainer and accelerate look at a model's device map before they wrap its forward or move it."""

    def _refuse(self, *_: object) -> Any:
        raise UnsupportedError(
            "Trainer and accelerator.prepare() cannot take a compiled model yet: they would wrap and move it. Write "
            "the training loop with model(...).loss.backward() and an optimizer, and do not prepare the model."
        )

    __len__ = __iter__ = __getitem__ = _refuse


def refuse_inner_calls(model: nn.Module) -> None:
    """Inner modules hold sharded weights: only the top module can be called.

    Those without tensors (activations) can: transformers shares some of them between all models.
    """
    for name, module in model.named_modules():
        if name and any(True for _ in itertools.chain(module.parameters(), module.buffers())):
            module.register_forward_pre_hook(_inner_raiser(name, type(model).__name__))


def check_model(model: Any) -> None:
    """Raises UnsupportedError for models that are wrapped, hooked or compiled already, TypeError for other objects."""
    kind = type(model)
    if not isinstance(model, nn.Module):
        raise TypeError(
            "ndcompile.compile takes a transformers PreTrainedModel or an nn.Module, not "
            f"{kind.__module__}.{kind.__name__}."
        )
    name = type(model).__name__
    _check_wrappers(model)
    if name.startswith("FSDP") or any(type(m).__name__.startswith("FSDP") for m in model.modules()):
        raise UnsupportedError(f"{name} was wrapped by fully_shard. Pass the plain model: ndcompile shards it itself.")
    forward = model.__dict__.get("forward")
    if type(forward).__name__ == "CompiledModel" or hasattr(forward, "prepared"):
        raise UnsupportedError(f"{name} is compiled already.")
    if hasattr(model, "_hf_hook") or any(hasattr(m, "_hf_hook") for m in model.modules()):
        raise UnsupportedError(f"{name} carries accelerate hooks (device_map or dispatch_model). Load it without them.")
    if getattr(model, "_device_mesh", None) is not None or any(isinstance(p, DTensor) for p in model.parameters()):
        raise UnsupportedError(
            f"{name} was distributed by from_pretrained(distributed_config=...). Load it without, or build it on meta."
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedError(f"{name} is quantized, which ndcompile cannot shard yet.")
    known = input_gradient_hooks(model)
    for fqn, module in model.named_modules():
        if fqn and (module._forward_hooks.keys() - known or module._forward_pre_hooks or module._backward_hooks):
            raise UnsupportedError(
                f"Module {fqn!r} has hooks, which a compiled graph would not run. Remove them, or hook the top module."
            )


def _check_wrappers(model: nn.Module) -> None:
    """A wrapper anywhere in the model, or a forward that accelerate replaced, would be lost or get into the graph."""
    for fqn, module in model.named_modules():
        kind = type(module).__name__
        if kind in WRAPPERS:
            what = f"Module {fqn!r}" if fqn else "The model"
            raise UnsupportedError(f"{what} is wrapped in {kind}. Pass the plain model: ndcompile shards it itself.")
        if "_original_forward" in module.__dict__:
            raise UnsupportedError(
                f"The forward of {fqn or type(model).__name__!r} was replaced by accelerator.prepare(). Compile the "
                "model without preparing it; for mixed precision use fsdp_mixed_precision or torch.autocast."
            )


def check_has_checkpoints(model: nn.Module) -> None:
    """Raises UnsupportedError for an ordinary nn.Module, which has no folders of safetensors and no `_init_weights`."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"{type(model).__name__} is no transformers model: give it real weights before ndcompile.compile, which "
            "slices them, and save and load its state_dict() with torch.distributed.checkpoint."
        )


def check_optimizers(model: nn.Module) -> None:
    """Raises UnsupportedError if an optimizer holds parameters of the model, which compile replaces.

    An optimizer that is no torch.optim.Optimizer, or holds copies of the parameters, is not found.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    for optimizer in gc.get_objects():
        if not issubclass(type(optimizer), torch.optim.Optimizer) or not hasattr(optimizer, "param_groups"):
            continue
        if any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"]):
            raise UnsupportedError(
                f"A {type(optimizer).__name__} optimizer was built before ndcompile.compile, which replaces "
                "parameters: it would update tensors that nobody uses. Compile first, then build the optimizer."
            )


def check_offload(config: DistributedConfig, device_type: str, cuda_graphs: bool) -> None:
    """What `fsdp_cpu_offload` needs on a mesh of this device, which is asked before any collective.

    Raises UnsupportedError, on every rank: torch's `clip_grad_norm_`, `full_tensor` and DCP communicate parameters and
    gradients where these are, so groups need a backend for host memory; a CUDA graph replays no copy on another stream
    from memory that an optimizer of the host writes.
    """
    if not config.fsdp_cpu_offload:
        return
    if device_type == "cpu":
        _logger.info("fsdp_cpu_offload changes nothing on a mesh of CPUs: parameters are in host memory already.")
        return
    if cuda_graphs:
        raise UnsupportedError("cuda_graphs=True cannot record the copies of fsdp_cpu_offload. Leave one of them off.")
    if backend_of("cpu") is None:
        raise UnsupportedError(
            f"fsdp_cpu_offload keeps parameters and gradients in host memory, but the process group communicates by "
            f"{dist.get_backend_config()!r}, which has no backend for it (clip_grad_norm_, full_tensor and DCP need "
            f'one). Start it with torch.distributed.init_process_group("{BOTH}").'
        )


def _raiser(sentence: str):
    def refuse(*args: Any, **kwargs: Any):
        raise UnsupportedError(sentence)

    return refuse


def _inner_raiser(name: str, model: str):
    def refuse(module: nn.Module, args: Any) -> None:
        raise UnsupportedError(
            f"{name!r} is part of a compiled {model}: its weights are shards, and only the whole model can be called. "
            "Ask it for output_hidden_states=True, or compile the part that you need by itself."
        )

    return refuse
