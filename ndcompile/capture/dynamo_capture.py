"""The second front end: Dynamo's graph of a prepared model becomes a `Captured`, like that of capture.py.

Dynamo traces the shadow of the model, whose parameters are stand-ins: tensors of tp-local shape without memory. They
arrive as placeholders of Dynamo's graph beside the caller's tensors. Replaying the graph
on the inputs that capture.py would use gives a graph for the same passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ndcompile.capture.capture import Captured, state_inputs
from ndcompile.capture.graph_input import ARGUMENT, BUFFER, COORDINATE, PARAMETER, GraphInput
from ndcompile.capture.shadow import Shadow
from ndcompile.capture.trace_graph import trace
from ndcompile.errors import NdcompileError, UnsupportedError
from ndcompile.private.dynamo import example_of, holds_float, is_checkpoint
from ndcompile.private.tracing import FakeTensorMode, guard_scalar
from ndcompile.private.transformers import AUXILIARY_LOSS


@dataclass(frozen=True)
class DynamoInputs:
    """The placeholders of Dynamo's graph. `states`: what they stand for, None for an argument of the caller.

    arguments: positions of the caller's tensors and sizes; floats, which Dynamo passes as tensors, are none (`Replay`).
    """

    placeholders: tuple[fx.Node, ...]
    states: tuple[GraphInput | None, ...]
    arguments: tuple[int, ...]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The caller's tensors, as fakes, by name."""
        values = {self.placeholders[p].name: self.placeholders[p].meta["example_value"] for p in self.arguments}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def describe(self) -> list[str]:
        """The caller's tensors as lines, without sizes: those may change, and may differ between data ranks."""
        return [f"argument {n}: {t.dtype}, {t.ndim} dims, {t.requires_grad}" for n, t in self.tensors.items()]

    def sizes(self) -> str:
        return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in self.tensors.items())


class StandIns:
    """Tensors in the places of parameters, buffers and coordinates of a shadow, while Dynamo traces it.

    They carry what they stand for in the attribute `stands_for`: an owner and a GraphInput.
    """

    def __init__(self, shadow: Shadow, model: nn.Module, owner: object) -> None:
        self.shadow, self.owner = shadow, owner
        for name, buffer in model.named_buffers():
            empty = _without_memory(tuple(buffer.shape), buffer.dtype, shadow.device)
            self._place(empty, GraphInput(BUFFER, name), (name,))
        for name, axis in shadow.axes.items():
            axis.coordinate = torch.zeros((), dtype=torch.int64, device=shadow.device)
            axis.coordinate.stands_for = owner, GraphInput(COORDINATE, name)  # type: ignore[attr-defined]
        self.parameters: dict[str, nn.Parameter] = {}
        self.follow(model)

    def follow(self, model: nn.Module) -> None:
        """Take over dtype and requires_grad of the model's parameters."""
        stored = dict(model.named_parameters())
        for entry in self.shadow.plan.parameters:
            real, old = stored[entry.fqn], self.parameters.get(entry.fqn)
            dtype = self.shadow.plan.compute_dtype(real.dtype)
            if old is None or old.dtype != dtype:
                old = nn.Parameter(_without_memory(entry.compute_shape, dtype, self.shadow.device))
                self._place(old, GraphInput(PARAMETER, entry.fqn), (entry.fqn, *entry.aliases))
                self.parameters[entry.fqn] = old
            old.requires_grad_(real.requires_grad)

    def _place(self, tensor: Tensor, meaning: GraphInput, names: Sequence[str]) -> None:
        tensor.stands_for = self.owner, meaning  # type: ignore[attr-defined]
        for name in names:
            owner, _, attribute = name.rpartition(".")
            module = self.shadow.modules[owner]
            (module._parameters if meaning.kind == PARAMETER else module._buffers)[attribute] = tensor


def stood_for(graph: fx.Graph) -> list[Any]:
    """The owners of the stand-ins in Dynamo's graph, each once."""
    found = (getattr(example_of(node), "stands_for", (None, None))[0] for node in graph.find_nodes(op="placeholder"))
    return list({id(owner): owner for owner in found if owner is not None}.values())


def read_inputs(graph: fx.Graph) -> DynamoInputs:
    """What the placeholders of Dynamo's graph are.

    Raises UnsupportedError for trainable parameters of other modules: nothing would reduce their gradients.
    """
    placeholders = tuple(graph.find_nodes(op="placeholder"))
    examples = [example_of(node) for node in placeholders]
    for node, example in zip(placeholders, examples, strict=True):
        if isinstance(example, nn.Parameter) and example.requires_grad and not hasattr(example, "stands_for"):
            raise UnsupportedError(
                f"The compiled function uses a trainable parameter besides those of the prepared model, {node.name!r} "
                f"of shape {tuple(example.shape)}: its gradient would be that of one rank alone. Compile the model by "
                "itself, or make that module part of it before ndcompile.prepare."
            )
    states = tuple(getattr(example, "stands_for", (None, None))[1] for example in examples)
    ours = zip(placeholders, states, strict=True)
    arguments = (number for number, (node, state) in enumerate(ours) if state is None and not holds_float(node))
    return DynamoInputs(placeholders, states, tuple(arguments))


def capture_from_dynamo(
    gm: fx.GraphModule, read: DynamoInputs, shadow: Shadow, model: nn.Module, fake_mode: FakeTensorMode
) -> Captured:
    """Replay Dynamo's graph on the inputs of capture.py, followed by the caller's. Sizes are Dynamo's, and so are the
    guards on them.

    Raises CaptureError, see `capture.py`.
    """
    inputs, fakes = state_inputs(shadow, model, fake_mode)
    for position in read.arguments:
        node = read.placeholders[position]
        inputs.append(GraphInput(ARGUMENT, node.name))
        fakes.append(node.meta["example_value"])
    _name_modules(gm, shadow.module)

    def program(*flat: Any) -> list[Any]:
        values = dict(zip(inputs, flat, strict=True))
        states = zip(read.placeholders, read.states, strict=True)
        outputs = Replay(gm).run(*(values.get(state or GraphInput(ARGUMENT, node.name)) for node, state in states))
        return list(outputs)

    module = trace(program, inputs, fakes, fake_mode, shadow.module)
    _, spec = pytree.tree_flatten([None] * len(module.graph.output_node().args[0]))  # type: ignore[arg-type]
    return Captured(module, spec, fake_mode, symbols={})


class Replay(fx.Interpreter):
    """Runs Dynamo's graph. Bodies of checkpointed layers, which Dynamo keeps as graphs of their own, run in line: what
    is recomputed is decided by passes/checkpoint_layers.py.

    With dynamic=True Dynamo makes floats symbolic as well (an epsilon, the scale of attention, a float of the caller):
    tensors whose `item()` the graph takes. Here they are numbers again, and Dynamo guards them: another number compiles
    again, as it does in `ndcompile.compile`.
    """

    def run_node(self, n: fx.Node) -> Any:
        value = n.meta.get("example_value")
        if n.target == "item" and isinstance(value, torch.SymFloat) and value.node.has_hint():
            return guard_scalar(value)
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if is_checkpoint(target):
            body, *operands = args
            return Replay(body).run(*operands)
        if target is torch.ops.ndcompile.needs_backend.default:
            return args[0]
        return super().call_function(target, args, dict(kwargs))


@torch.library.custom_op("ndcompile::needs_backend", mutates_args=())
def needs_backend(x: Tensor) -> Tensor:
    """Stands in Dynamo's graph of a prepared model, and is gone from ours: whoever runs it took another backend."""
    raise NdcompileError('The model was prepared for torch.compile(model, backend="ndcompile"). Use that backend.')


@needs_backend.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _name_modules(gm: fx.GraphModule, shadow: nn.Module) -> None:
    """Give all nodes of `gm` and its checkpointed bodies the `meta["custom"]` that capture.py gives."""
    names = {name for name, _ in shadow.named_modules()}
    for graph in (part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)):
        for node in graph.nodes:
            custom: dict[str, Any] = {}
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            if (name := _innermost(stack, names)) is not None:
                custom["module"] = name
            if AUXILIARY_LOSS in (node.meta.get("stack_trace") or ""):
                custom["auxiliary_loss"] = True
            node.meta["custom"] = custom


def _innermost(stack: Sequence[tuple[str, type]], names: set[str]) -> str | None:
    """FQN of the innermost module. Dynamo spells how it found a module, such as `L['self'].shadow.module.model.norm`:
    the first entry of the stack is the top module's, and the others begin with it."""
    if not stack:
        return None
    top, innermost = stack[0][0], stack[-1][0]
    name = innermost[len(top) :].lstrip(".") if innermost.startswith(top) else ""
    return name if name in names else None


def _without_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor whose memory is given back: Dynamo looks at sizes and strides alone."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor
