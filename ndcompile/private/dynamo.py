"""Private symbols of Dynamo: what the graph that it gives to a backend says of its inputs."""

from __future__ import annotations

import torch
from torch._dynamo import error_on_graph_break, patch_dynamo_config
from torch._dynamo.exc import ShortenTraceback
from torch._guards import CompileContext
from torch._higher_order_ops.wrap import TagActivationCheckpoint

from ndcompile.errors import NdcompileError
from ndcompile.private.tracing import FakeTensorMode, TracingContext


class RefusedCall(ShortenTraceback, NdcompileError):
    """Raised while Dynamo traces: it reaches the caller as it is. After an error of another class Dynamo, without
    fullgraph=True, would leave the traced function to Python, for all later calls too."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


def example_of(placeholder: torch.fx.Node) -> object:
    """The value that Dynamo lifted to this placeholder of its graph: the caller's or a module's own tensor, no fake."""
    return placeholder.meta["grapharg"].example if "grapharg" in placeholder.meta else None


def holds_float(placeholder: torch.fx.Node) -> bool:
    """Whether a placeholder of Dynamo's graph is a symbolic float, which Dynamo passes as a tensor."""
    value = placeholder.meta.get("example_value")
    return placeholder.op == "placeholder" and isinstance(getattr(value, "item_memo", None), torch.SymFloat)


def is_checkpoint(target: object) -> bool:
    """Whether a node of Dynamo's graph runs the body of a layer with gradient checkpointing."""
    return isinstance(target, TagActivationCheckpoint)


def compiled_frame() -> int | None:
    """Which Python frame Dynamo is compiling now: the same number for all sizes that one frame is compiled for."""
    current = CompileContext.current_compile_id()
    return None if current is None else current.frame_id


def dynamo_fake_mode() -> FakeTensorMode:
    """The fake mode of the trace whose graph a torch.compile backend is given."""
    context = TracingContext.try_get()
    assert context is not None
    assert context.fake_mode is not None
    return context.fake_mode


__all__ = [
    "RefusedCall",
    "compiled_frame",
    "dynamo_fake_mode",
    "error_on_graph_break",
    "example_of",
    "holds_float",
    "is_checkpoint",
    "patch_dynamo_config",
]
