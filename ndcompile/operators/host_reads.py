"""A number that the host reads from the device, in two operators: the first marks a place on the device's stream, the
second copies what was there and waits for it.

`tensor.to("cpu")` copies on the stream that computes: the host waits for all that was launched before it, and while it
wakes up and launches what follows, the device has nothing to do. Here the copy runs on a stream of its own, behind what
was launched before `start_host_read`; what is launched between the two operators runs while `end_host_read` waits. The
copy itself is launched by the second operator, so that the device gets those launches first.

On the CPU the second operator is a copy. Graphs get them from passes/overlap_dispatch.py. They are defined without
`torch.library.custom_op`, whose layers take 25 microseconds of the host a call, while the device waits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from ndcompile.operators.routing_checks import checked_splits

COPIES = (torch.ops.prims.device_put.default, torch.ops.aten._to_copy.default)
"""What a copy to the host is in a lowered graph."""


def _start(x: Tensor) -> Tensor:
    """A token for `end_host_read`: the address of x. The values that it copies are those that x has here."""
    if x.device.type == "cuda":
        _copying(x.device).wait_stream(torch.cuda.current_stream(x.device))
    return torch.tensor([x.data_ptr()])


def _end(token: Tensor, x: Tensor, before: Sequence[Tensor]) -> Tensor:
    """The values of x in memory of the CPU.

    The host waits for the stream of copies, not for what was launched on others, such as what computes `before`: that
    these are operands makes inductor launch them first, where it would compute them when they are read.
    """
    if x.device.type != "cuda":
        return x.clone(memory_format=torch.contiguous_format)
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    stream = _copying(x.device)
    if token.item() != x.data_ptr():  # a copy that a compiler made since, for strides or alignment
        stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        host.copy_(x, non_blocking=True)
    stream.synchronize()
    return host


def _on_host(token: Tensor, x: Tensor, before: Sequence[Tensor]) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


@functools.cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device on which small copies to the host run."""
    return torch.cuda.Stream(device)


_library = torch.library.Library("ndcompile", "FRAGMENT")
_library.define("start_host_read(Tensor x) -> Tensor")
_library.define("end_host_read(Tensor token, Tensor x, Tensor[] before) -> Tensor")
_library.impl("start_host_read", _start, "CompositeExplicitAutograd")
_library.impl("end_host_read", _end, "CompositeExplicitAutograd")
torch.library.register_fake(
    "ndcompile::start_host_read", lambda x: torch.empty(1, dtype=torch.int64, device="cpu"), lib=_library
)
torch.library.register_fake("ndcompile::end_host_read", _on_host, lib=_library)

START_HOST_READ = torch.ops.ndcompile.start_host_read.default
END_HOST_READ = torch.ops.ndcompile.end_host_read.default


def host_reads(graph: fx.Graph) -> list[fx.Node]:
    """The nodes at which the host reads numbers of rows, in order."""
    return graph.find_nodes(op="call_function", target=checked_splits)


def launch_before(read: fx.Node, nodes: Sequence[fx.Node]) -> None:
    """Have nodes launched before the host waits at a read whose copy is apart."""
    wait = read.all_input_nodes[0]
    if wait.target is END_HOST_READ:
        wait.args = (*wait.args[:2], list(nodes))


def part_copy_from_read(graph: fx.Graph, read: fx.Node) -> list[fx.Node]:
    """Let the read's copy from a device start where it stands and be waited for at the read. Returns the nodes that
    wait: none on the CPU, where nothing is copied."""
    copy = read.all_input_nodes[0]
    if copy.target not in COPIES or len(copy.users) > 1:
        return []
    source = copy.all_input_nodes[0]
    if source.meta["val"].device.type != "cuda" or source.meta["val"].dtype != copy.meta["val"].dtype:
        return []
    with graph.inserting_before(copy):
        start = graph.call_function(START_HOST_READ, (source,))
    with graph.inserting_before(read):
        wait = graph.call_function(END_HOST_READ, (start, source, []))
    start.meta, wait.meta = dict(copy.meta), dict(copy.meta)
    copy.replace_all_uses_with(wait)
    graph.erase_node(copy)
    return [wait]
