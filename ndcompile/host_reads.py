"""A number that the host reads from the device, in two operators: the copy starts, and later the host waits for it.

`tensor.to("cpu")` copies on the stream that computes: the host waits for all that was launched before it, and while it
wakes up and launches what follows, the device has nothing to do. Here the copy runs on a stream of its own, behind what
was launched before `copy_to_host`; what is launched between the two operators runs while `wait_for_copy` waits.

On the CPU both operators are copies. Graphs get them from passes/overlap_dispatch.py.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, fx

from ndcompile.routing_checks import CHECKED_SPLITS

COPIES = (torch.ops.prims.device_put.default, torch.ops.aten._to_copy.default)
"""What a copy to the host is in a lowered graph."""


@torch.library.custom_op("ndcompile::copy_to_host", mutates_args=())
def copy_to_host(x: Tensor) -> Tensor:
    """`x` in pinned memory of the CPU, there once `wait_for_copy` returns."""
    if x.device.type != "cuda":
        return x.clone()
    stream = _copying(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        host.copy_(x, non_blocking=True)
    x.record_stream(stream)
    return host


@copy_to_host.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


@torch.library.custom_op("ndcompile::wait_for_copy", mutates_args=())
def wait_for_copy(host: Tensor, x: Tensor) -> Tensor:
    """`host`, which `copy_to_host` copies from `x`, once it is there; `x` is given so that its memory stays.

    The host waits for the stream of copies, not for what was launched on others."""
    if x.device.type == "cuda":
        _copying(x.device).synchronize()
    return host.clone()


@wait_for_copy.register_fake
def _(host: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(host)


@functools.cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device on which small copies to the host run."""
    return torch.cuda.Stream(device)


COPY_TO_HOST = torch.ops.ndcompile.copy_to_host.default
WAIT_FOR_COPY = torch.ops.ndcompile.wait_for_copy.default


def host_reads(graph: fx.Graph) -> list[fx.Node]:
    """The nodes at which the host reads numbers of rows, in order."""
    return graph.find_nodes(op="call_function", target=CHECKED_SPLITS)


def part_copy_from_read(graph: fx.Graph, read: fx.Node) -> list[fx.Node]:
    """Let the read's copy from a device start where it stands and be waited for at the read. Returns the nodes that
    wait: none on the CPU, where nothing is copied."""
    copy = read.all_input_nodes[0]
    if copy.target not in COPIES or len(copy.users) > 1:
        return []
    source = copy.all_input_nodes[0]
    if source.meta["val"].device.type != "cuda":
        return []
    with graph.inserting_before(copy):
        start = graph.call_function(COPY_TO_HOST, (source,))
    with graph.inserting_before(read):
        wait = graph.call_function(WAIT_FOR_COPY, (start, source))
    start.meta, wait.meta = dict(copy.meta), dict(copy.meta)
    copy.replace_all_uses_with(wait)
    graph.erase_node(copy)
    return [wait]
