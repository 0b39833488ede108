"""A function on fake tensors as one FX graph, each node with its module and source line, and what stops the trace."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn

from ndcompile.capture.asserted_branches import asserted_truth
from ndcompile.capture.graph_input import COORDINATE, GraphInput
from ndcompile.capture.parameter_writes import take_out_writes
from ndcompile.errors import CaptureError
from ndcompile.private.tracing import (
    FakeTensor,
    FakeTensorMode,
    TracingContext,
    checks_as_nodes,
    compiling,
    data_as_detached,
    functions_as_nodes,
    make_fx,
    scans_as_operators,
    tracing,
)
from ndcompile.verify.type_inference import SHAPE_ONLY, written_memory

aten = torch.ops.aten

RETURN_ARGUMENT = {
    aten.contiguous.default,
    aten.to.device,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.other,
    aten.type_as.default,
}
"""Operators that return their argument, not a view of it, where there is nothing to convert."""

READS_VALUES = "GuardOnDataDependentSymNode"
"""What the tracer raises where Python asks for the value of a tensor."""


def trace(
    program: Callable[..., list[Any]],
    inputs: Sequence[GraphInput],
    fakes: Sequence[Any],
    fake_mode: FakeTensorMode,
    model: nn.Module,
) -> fx.GraphModule:
    """The graph of `program(*fakes)`, with the metadata that `Captured` promises. `model` names it in errors.

    Raises CaptureError, see `capture`.
    """
    try:
        with (
            tracing(TracingContext(fake_mode)),
            fx_traceback.preserve_node_meta(),
            compiling(),
            scans_as_operators(),
            functions_as_nodes(),
            checks_as_nodes(asserted_truth),
            data_as_detached(),
            torch.set_grad_enabled(torch.is_grad_enabled()),  # a trace that fails may leave it as it is
        ):
            module = make_fx(
                program, tracing_mode="symbolic", pre_dispatch=True, _allow_non_fake_inputs=True,
                record_stack_traces=True,
            )(*fakes)  # fmt: skip
    except Exception as error:
        if _refused_by_model(error):
            raise
        by_tp = any(spec.kind == COORDINATE and spec.name == "tp" for spec in inputs)
        raise CaptureError(_explain(error, model, by_tp)) from error
    for node, spec, fake in zip(module.graph.find_nodes(op="placeholder"), inputs, fakes, strict=True):
        node.meta["input"], node.meta["val"] = spec, fake
    module.__dict__.pop("shape_env", None)  # the tracer leaves it there; caches of compiled graphs cannot take it
    _follow_arguments(module.graph)
    module.meta["parameter_writes"] = take_out_writes(module.graph)
    module.graph.eliminate_dead_code()
    _check_constants(module, model)
    mark_differentiable(module.graph)
    return module


def _follow_arguments(graph: fx.Graph) -> None:
    """Take out conversions that return their argument where gradients are off.

    `x.to(x.dtype)` is x itself, and the tracer takes every later use of x for a use of this node. If it stands in a
    no_grad region, the gradients of later uses outside of it would end there.
    """
    enabled = True
    for node in list(graph.nodes):
        if node.target is torch._C._set_grad_enabled:
            enabled = node.args[0]
        elif not enabled and node.target in RETURN_ARGUMENT and _same_tensor(node, node.args[0]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _same_tensor(node: fx.Node, other: fx.Node) -> bool:
    value, source = node.meta["val"], other.meta["val"]
    same_memory = value.untyped_storage()._cdata == source.untyped_storage()._cdata
    return same_memory and (value.dtype, value.shape, value.stride()) == (source.dtype, source.shape, source.stride())


def _check_constants(module: fx.GraphModule, model: nn.Module) -> None:
    """A tensor that no node of the graph made, and that is fake, would stand for a value that is not computed."""
    for node in module.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(module, node.target, None), FakeTensor):
            raise CaptureError(
                f"{type(model).__name__}, layer {node.meta.get('custom', {}).get('module', '')!r}, computes a value "
                f"outside of the trace: {_line_of(next(iter(node.users)))}. A higher-order operator or a custom kernel "
                "does so: choose another implementation of this layer in the model's config."
            )


def mark_differentiable(graph: fx.Graph) -> None:
    """Set `meta["differentiable"]`: whether a gradient flows back through the node. (Traced values are detached.)

    Memory that is written in place may become differentiable after the node that made it; its nodes count as such.
    """
    memory = written_memory(graph)
    enabled = True
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = node.args[0]
        value = node.meta.get("val")
        if node.op == "placeholder":
            differentiable = isinstance(value, Tensor) and value.requires_grad
        else:
            carries = any(source.meta["differentiable"] for source in node.all_input_nodes)
            floating = isinstance(value, tuple | list)  # of tensors; sizes are numbers
            if isinstance(value, Tensor):
                floating = value.is_floating_point() or value.is_complex()
            cut = node.target is torch.ops.aten.detach.default or (node.target in SHAPE_ONLY and node not in memory)
            differentiable = enabled and carries and floating and not cut
        node.meta["differentiable"] = differentiable


class named_modules:
    """While active, nodes carry the FQN of the module whose forward made them in `meta["custom"]["module"]`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.wrapped: list[tuple[nn.Module, Callable[..., Any] | None]] = []

    def __enter__(self) -> None:
        for name, module in self.module.named_modules():
            self.wrapped.append((module, module.__dict__.get("forward")))
            module.forward = _annotated(module.forward, name)

    def __exit__(self, *_: object) -> None:
        for module, forward in self.wrapped:
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _annotated(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    import functools

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        with fx_traceback.annotate({"module": name}):
            try:
                return forward(*args, **kwargs)
            except Exception as error:
                if not hasattr(error, "in_module"):  # the innermost one knows
                    error.in_module = name  # type: ignore[attr-defined]
                raise

    return call


def _refused_by_model(error: Exception) -> bool:
    """Whether a model of transformers says what is wrong with its arguments: it raises a ValueError. One that Python
    raises in its code (sizes that cannot be unpacked) is of the shapes that the code was given, by a plan perhaps."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    raised = (frame.line or "").lstrip().startswith("raise")
    return type(error) is ValueError and "/transformers/models/" in frame.filename and raised


def _explain(error: Exception, model: nn.Module, by_tp: bool) -> str:
    """The layer, the innermost line of model code, what happened there, and a remedy, if there is one to name. by_tp:
    whether tp cuts anything."""
    frames = traceback.extract_tb(error.__traceback__)
    model_frames = [f for f in frames if "/transformers/models/" in f.filename or f.filename.endswith(_file_of(model))]
    frame = model_frames[-1] if model_frames else frames[-1]
    message = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if READS_VALUES in type(error).__name__:
        remedy = (
            "This line branches on the values of a tensor, so one graph cannot serve all inputs. Choose an "
            "implementation of this layer without it (model.set_experts_implementation, attn_implementation=), or "
            "rewrite the line with torch.where."
        )
    elif isinstance(error, NotImplementedError):
        remedy = "A graph cannot hold what this line does: the layer has to be written without it."
    elif not by_tp:
        remedy = ""
    else:
        remedy = (
            "If this line fixes a global size (heads, vocabulary) that tp cuts, keep the projections of this layer "
            "whole in tp_plan ('colwise_gather_output' in front, 'rowwise_split_input' behind)."
        )
    return (
        f"{type(model).__name__} could not be captured as one graph: layer {getattr(error, 'in_module', '')!r}, "
        f"{frame.filename}:{frame.lineno}: {frame.line}\n  {type(error).__name__}: {message}\n{remedy}"
    ).rstrip()


def _line_of(node: fx.Node) -> str:
    """The source line that made a node."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    return ": ".join(line.strip() for line in lines[-2:])


def _file_of(module: nn.Module) -> str:
    import inspect

    try:
        return inspect.getfile(type(module))
    except TypeError:
        return "<unknown>"
