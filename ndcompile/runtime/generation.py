"""`model.generate()` of a compiled model: transformers' own loop around the compiled forward.

What several ranks add: data ranks go on until all of them have finished, as a forward is collective; tp ranks draw the
same random numbers, as they must choose the same token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticCache

from ndcompile.errors import UnsupportedError
from ndcompile.private.transformers import PREPARE_STATIC_CACHE, STATIC_CACHE_SHAPE, SWITCH_FOR_DECODING
from ndcompile.runtime.compiled_model import CompiledModel


def generate(compiled: CompiledModel, *args: Any, **kwargs: Any) -> Any:
    """`transformers.GenerationMixin.generate` on all ranks; returns this rank's sequences, alike on a tp group.

    Each data rank passes prompts of its own, and tp ranks the same ones. `synced_gpus` is on where data ranks share
    collectives. Sampling uses the random state of the first rank of each tp group; the others' stays as it was.

    Raises AgreementError on every rank if tp ranks were given different tensors, and UnsupportedError for
    `use_cache=False` on several data ranks.
    """
    model, method = compiled.model, type(compiled.model).generate
    config = kwargs.get("generation_config") or model.generation_config
    if compiled.mesh.data_world_size > 1 and kwargs.get("use_cache", config.use_cache) is False:
        raise UnsupportedError(
            "generate(use_cache=False) on several data ranks: one that has finished goes on with inputs of other "
            "lengths, and the others would wait for it. Use the cache (use_cache=True)."
        )
    compiled.generations += 1
    step = f"generate{compiled.generations}"
    given = inspect.signature(method).bind(model, *args, **kwargs).arguments
    tensors = {**given.pop("kwargs", {}), **given}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    kwargs.setdefault("synced_gpus", compiled.mesh.data_world_size > 1)
    kwargs.setdefault("disable_compile", True)  # transformers would compile the compiled forward again
    with compiled.agreement.step(step):
        compiled.agreement.same_inputs(f"{step}/prompts", tensors, 0)
        returned = kwargs.get("return_dict_in_generate", config.return_dict_in_generate)  # the cache with it
        kept = nullcontext() if returned or not compiled.options.cuda_graphs else _kept_cache(compiled)
        with _one_random_stream(compiled, f"{step}/random"), _left_alone(model), kept, compiled.repeating():
            return method(model, *args, **kwargs)


@contextmanager
def _kept_cache(compiled: CompiledModel) -> Iterator[None]:
    """While active, transformers' loop uses the static cache of the last time, if it needs the same one."""
    model = compiled.model
    original = getattr(model, PREPARE_STATIC_CACHE)

    def prepare(**arguments: Any) -> Any:
        fresh = original(**arguments)
        if not isinstance(fresh, StaticCache):
            return fresh
        return compiled.kept_cache.instead_of(fresh, arguments["batch_size"], model.dtype)

    setattr(model, PREPARE_STATIC_CACHE, prepare)
    try:
        yield
    finally:
        delattr(model, PREPARE_STATIC_CACHE)


@contextmanager
def _one_random_stream(compiled: CompiledModel, key: str) -> Iterator[None]:
    """Ranks of a tp group draw what its first rank draws."""
    if compiled.mesh.size("tp") == 1:
        yield
        return
    device = compiled.mesh.device
    module = torch.get_device_module(device) if device.type != "cpu" else torch.random
    own: Tensor = module.get_rng_state()
    held = compiled.agreement.exchange(key, [compiled.mesh.data_rank, own.numpy().tobytes().hex()])
    first = next(state for rank, state in held if rank == compiled.mesh.data_rank)
    shared = torch.frombuffer(bytearray.fromhex(first), dtype=torch.uint8)
    if torch.equal(shared, own):
        yield
        return
    module.set_rng_state(shared)
    try:
        yield
    finally:
        module.set_rng_state(own)


@contextmanager
def _left_alone(model: Any) -> Iterator[None]:
    """While active, transformers' loop finds no device map, which refuses Trainer and accelerate, switches no experts
    implementation for decoding, which a captured graph could not follow, and allocates no static cache of all heads."""
    device_map = model.__dict__.pop("hf_device_map", None)
    replaced = {SWITCH_FOR_DECODING: nullcontext, STATIC_CACHE_SHAPE: lambda: None}
    for name, method in replaced.items():
        setattr(model, name, method)
    try:
        yield
    finally:
        for name in replaced:
            delattr(model, name)
        if device_map is not None:
            model.hf_device_map = device_map
