"""Parameters that live in host memory: copies of their shards to the device, and of reduced gradients back.

In a captured graph a parameter is followed by one node, `to_device(weight, device)`. Traced, it is two in forward and
one in backward, so that passes can put work between a copy's start and its end:

    shard = copied(copy_to_device(weight, device))        gradient = copy_to_host(reduced)

On an accelerator all copies run on streams of their own, from and into pinned memory. They start behind what the device
was given before, as a collective does, and `copied` makes the current stream wait for the one copy that it is given: it
returns a tensor of its own, so that no compiler takes the two for the same memory and reads before it waited.

The host does not wait in either direction. Whoever lets it go on does: `finish` before anybody may read a gradient, or
write to a parameter that is still being copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

HOST = torch.device("cpu")


@dataclass
class CopyStreams:
    """Streams of one device, and the ends of the copies that nobody has waited for, by address of their results.

    Addresses, as c10d does for collectives: compiled code may hand a result on as another tensor on the same memory.
    """

    incoming: Any
    outgoing: Any
    ends: dict[int, Any] = field(default_factory=dict)


_streams: dict[torch.device, CopyStreams] = {}
"""By device; as long as the process, like the device's own streams."""


def _streams_of(device: torch.device) -> CopyStreams:
    if device not in _streams:
        module = torch.get_device_module(device)
        _streams[device] = CopyStreams(module.Stream(device=device), module.Stream(device=device))
    return _streams[device]


def finish(device: torch.device) -> None:
    """Wait, on the host, until all copies to and from `device` are done."""
    if device in _streams:
        _streams[device].incoming.synchronize()
        _streams[device].outgoing.synchronize()


def host_memory(shape: tuple[int, ...], dtype: torch.dtype, pinned: bool, zeros: bool = False) -> Tensor:
    """A new tensor in host memory; pinned where copies to a device are to run beside the host's work."""
    create = torch.zeros if zeros else torch.empty
    return create(shape, dtype=dtype, device=HOST, pin_memory=pinned)


@torch.library.custom_op("ndcompile::copy_to_device", mutates_args=())
def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Start to copy `x`; the result may be given to `copied` alone."""
    if device.type == "cpu":
        return x.clone(memory_format=torch.contiguous_format)
    module, streams = torch.get_device_module(device), _streams_of(device)
    result = torch.empty(x.shape, dtype=x.dtype, device=device)
    streams.incoming.wait_stream(module.current_stream(device))  # it may still use the memory for what had it before
    with module.stream(streams.incoming):
        result.copy_(x, non_blocking=True)
        streams.ends[result.data_ptr()] = streams.incoming.record_event()
    return result


@copy_to_device.register_fake
def _(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=device)


@torch.library.custom_op("ndcompile::copied", mutates_args=())
def copied(x: Tensor) -> Tensor:
    """What `copy_to_device` started to copy, when it is there."""
    if x.device.type != "cpu":
        current, streams = torch.get_device_module(x.device).current_stream(x.device), _streams_of(x.device)
        end = streams.ends.pop(x.data_ptr(), None)
        if end is None:  # waited for before, or handed on at another address
            current.wait_stream(streams.incoming)
        else:
            current.wait_event(end)
    return x.clone()


@copied.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("ndcompile::copy_to_host", mutates_args=())
def copy_to_host(x: Tensor) -> Tensor:
    """Start to copy `x` into new host memory. The result may be read after `finish`."""
    if x.device.type == "cpu":
        return x.clone(memory_format=torch.contiguous_format)
    module, streams = torch.get_device_module(x.device), _streams_of(x.device)
    result = host_memory(tuple(x.shape), x.dtype, pinned=True)
    own = x.clone(memory_format=torch.contiguous_format)  # compiled code may write into the memory of `x` from here on
    streams.outgoing.wait_stream(module.current_stream(x.device))
    with module.stream(streams.outgoing):
        result.copy_(own, non_blocking=True)
    own.record_stream(streams.outgoing)
    return result


@copy_to_host.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=HOST)


class _ToDevice(torch.autograd.Function):
    """A shard on the device; its gradient, reduced already, goes back to the host."""

    @staticmethod
    def forward(ctx, x: Tensor, device: torch.device) -> Tensor:
        return copied(copy_to_device(x, device))

    @staticmethod
    def backward(ctx, grad: Tensor):
        return copy_to_host(grad.contiguous()), None


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    return _ToDevice.apply(x, device)


_library = torch.library.Library("ndcompile", "FRAGMENT")
_library.define("to_device(Tensor x, Device device) -> Tensor")
_library.impl("to_device", _to_device, "CompositeImplicitAutograd")

to_device = torch.ops.ndcompile.to_device.default
COPY, COPIED, BACK = (
    getattr(torch.ops.ndcompile, name).default for name in ("copy_to_device", "copied", "copy_to_host")
)
"""The nodes of lowered graphs."""


class Finishing(torch.autograd.Function):
    """Identity on tensors whose backward waits for the copies of the graph that used them."""

    @staticmethod
    def forward(ctx, x: Tensor, device: torch.device) -> Tensor:
        ctx.device = device
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        finish(ctx.device)
        return grad, None
