"""Capture: the model's forward as one FX graph on fake tensors, in the shapes that one rank computes with.

Parameters are replaced by fakes of their tp-local shape and plan modules emit `redistribute` nodes, so that the graph
is already the rank's program; no DTensor is dispatched in it. Nothing in it depends on the rank: the rank's index is an
input.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from ndcompile.boundaries import Boundary, install_boundaries
from ndcompile.caches import CacheUpdate, traced_update
from ndcompile.call import Call
from ndcompile.errors import CaptureError
from ndcompile.expert_exchange import install_exchanges
from ndcompile.graph_input import ARGUMENT, BUFFER, CACHE, COORDINATE, PARAMETER, VARYING_CACHE, GraphInput
from ndcompile.mesh import StorageMesh
from ndcompile.sharding_plan import ShardingPlan
from ndcompile.torch_private import (
    ConstantSource,
    DimDynamic,
    FakeTensor,
    FakeTensorMode,
    ShapeEnv,
    TracingContext,
    compiling,
    functions_as_nodes,
    make_fx,
    scans_as_operators,
    tracing,
)
from ndcompile.transformers_private import marked_auxiliary_loss, unpacked_positions
from ndcompile.type_inference import SHAPE_ONLY, written_memory


@dataclass
class Captured:
    """A captured graph.

    Placeholders carry `meta["input"]` (GraphInput); all nodes `meta["val"]` (fake tensor), `meta["differentiable"]` and
    `meta["custom"]["module"]` (FQN of the module that made them). symbols: the sizes of the call, symbols or numbers.
    shapes: those of the call, see `Call.shapes`. counted: layers whose numbers of dropped tokens are returned behind
    the model's outputs; behind them come the tensors of `cache`. cache_leaf: where in the outputs the cache stands.
    """

    module: fx.GraphModule
    output_spec: pytree.TreeSpec
    fake_mode: FakeTensorMode
    symbols: dict[str, Any]
    shapes: tuple[Any, ...] = ()
    counted: tuple[str, ...] = ()
    cache: CacheUpdate | None = None
    cache_leaf: int | None = None

    @property
    def returned(self) -> int:
        """How many outputs the caller sees, or counts; the others go into the cache."""
        return self.output_spec.num_leaves + len(self.counted) - (self.cache_leaf is not None)

    @property
    def placeholders(self) -> list[fx.Node]:
        return self.module.graph.find_nodes(op="placeholder")

    def serves(self, call: Call) -> bool:
        """Whether what was assumed of the symbolic sizes while tracing and compiling holds for the sizes of `call`."""
        sizes = call.sizes
        if sizes.keys() != self.symbols.keys() or call.shapes != self.shapes:
            return False
        if any(isinstance(symbol, int) and symbol != sizes[name] for name, symbol in self.symbols.items()):
            return False
        values = self._values(sizes)
        env: Any = self.fake_mode.shape_env
        return all(bool(guard.expr.subs(values)) for guard in env.guards) if values else True

    def evaluate(self, expression: Any, sizes: Mapping[str, int]) -> int:
        """The value of an expression in the symbols at a call."""
        return int(expression.subs(self._values(sizes)))

    def _values(self, sizes: Mapping[str, int]) -> dict[Any, int]:
        # _expr is the symbol as it was made; expr is what the trace found it to be equal to.
        return {s.node._expr: sizes[name] for name, s in self.symbols.items() if not isinstance(s, int)}


class Shadow:
    """A copy of the model for tracing: no weights, plan modules wrapped. The user's model stays as it is."""

    def __init__(self, model: nn.Module, plan: ShardingPlan, mesh: StorageMesh) -> None:
        self.plan, self.device = plan, mesh.device
        self.module = copy_without_weights(model)
        if isinstance(model, PreTrainedModel):
            _forget_cache(self.module.config)
        self.axes = {name: Boundary(axis) for name, axis in mesh.axes.items()}
        self.dropped: dict[str, Tensor] = {}
        if "tp" in self.axes:
            install_boundaries(self.module, plan, self.axes["tp"])
        if plan.experts:
            install_exchanges(self.module, plan.experts, self.axes, self.dropped)
        self.modules = dict(self.module.named_modules())

    def follow(self, model: nn.Module) -> None:
        """Take over what may change between captures: training flags."""
        for name, module in model.named_modules():
            self.modules[name].training = module.training


def copy_without_weights(model: nn.Module) -> Any:
    """A deep copy on the meta device, ties kept. Hooks of the top module stay behind: they run outside the graph."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty(b.shape, dtype=b.dtype, device="meta")
    state = {key: model.__dict__[key] for key in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")}
    for key in state:
        memo[id(state[key])] = type(state[key])()
    return copy.deepcopy(model, memo)


def capture(shadow: Shadow, model: nn.Module, call: Call, dynamic: bool, growing: bool = True) -> Captured:
    """Trace one call of `model` (for its training flags, dtypes and requires_grad) on `shadow`.

    `dynamic` makes batch and sequence symbolic, `growing` the lengths of a key-value cache. Raises CaptureError with
    the user's source line for data-dependent control flow, shapes that do not fit, and whatever else stops the trace.
    """
    shadow.follow(model)
    fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fake_mode.allow_scalar_outputs = True  # the numbers of rows that ranks exchange are read from tensors
    symbols = _symbols(fake_mode, call, dynamic, growing)
    inputs, fakes = state_inputs(shadow, model, fake_mode)
    with fake_mode:
        for name, tensor in zip(call.tensor_names, call.tensors, strict=True):
            shape, device = call.symbolic_shape(tensor, symbols), shadow.device
            fake = torch.empty(shape, dtype=tensor.dtype, device=device if tensor.ndim else tensor.device)
            inputs.append(GraphInput(ARGUMENT, name))
            fakes.append(fake.requires_grad_(tensor.requires_grad))
        if call.cache is not None:
            varying = call.cache.varying()
            inputs += [GraphInput(VARYING_CACHE if name in varying else CACHE, name) for name in call.cache.names]
            fakes += call.cache.fakes(call.batch, symbols, shadow.device)
    results: list[tuple[Any, ...]] = []

    def program(*flat: Any) -> list[Any]:
        shadow.dropped.clear()
        output, cache, cached = _run(shadow, call, inputs, flat)
        leaves, spec = pytree.tree_flatten(output, is_leaf=lambda leaf: leaf is cache and cache is not None)
        place = next((number for number, leaf in enumerate(leaves) if cache is not None and leaf is cache), None)
        update, kept = (None, []) if cache is None else traced_update(cache, cached)
        results.append((spec, update, place))
        return [leaf for number, leaf in enumerate(leaves) if number != place] + list(shadow.dropped.values()) + kept

    with ExitStack() as stack:
        stack.enter_context(_named_modules(shadow.module))
        stack.enter_context(marked_auxiliary_loss(shadow.module))
        if "position_ids" not in call.names:
            stack.enter_context(unpacked_positions())
        module = trace(program, inputs, fakes, fake_mode, shadow.module)
    spec, update, place = results[-1]
    captured = Captured(module, spec, fake_mode, symbols, call.shapes, tuple(shadow.dropped), update, place)
    module.graph.output_node().meta["returned"] = captured.returned
    return captured


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
            torch.set_grad_enabled(torch.is_grad_enabled()),  # a trace that fails may leave it as it is
        ):
            module = make_fx(
                program, tracing_mode="symbolic", pre_dispatch=True, _allow_non_fake_inputs=True,
                record_stack_traces=True,
            )(*fakes)  # fmt: skip
    except Exception as error:
        raise CaptureError(_explain(error, model)) from error
    for node, spec, fake in zip(module.graph.find_nodes(op="placeholder"), inputs, fakes, strict=True):
        node.meta["input"], node.meta["val"] = spec, fake
    module.__dict__.pop("shape_env", None)  # the tracer leaves it there; caches of compiled graphs cannot take it
    module.graph.eliminate_dead_code()
    _check_constants(module, model)
    mark_differentiable(module.graph)
    return module


def _check_constants(module: fx.GraphModule, model: nn.Module) -> None:
    """A tensor that no node of the graph made, and that is fake, would stand for a value that is not computed."""
    for node in module.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(module, node.target, None), FakeTensor):
            raise CaptureError(
                f"{type(model).__name__}, layer {node.meta.get('custom', {}).get('module', '')!r}, computes a value "
                f"outside of the trace: {_line_of(next(iter(node.users)))}. A higher-order operator or a custom kernel "
                "does so: choose another implementation of this layer in the model's config."
            )


def _line_of(node: fx.Node) -> str:
    """The source line that made a node."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    return ": ".join(line.strip() for line in lines[-2:])


def mark_differentiable(graph: fx.Graph) -> None:
    """Set `meta["differentiable"]`: whether a gradient flows back through the node. (Traced values are detached.)

    Memory that is written in place may become differentiable after the node that made it; its nodes count as such. So
    does a cast without effect under no_grad: it returns the tensor itself, and what follows the no_grad uses its node.
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
            differentiable = (enabled or returns_its_input(node)) and carries and floating and not cut
        node.meta["differentiable"] = differentiable


NO_EFFECT = {
    torch.ops.aten.to.dtype,
    torch.ops.aten.to.dtype_layout,
    torch.ops.aten.to.device,
    torch.ops.aten.to.other,
    torch.ops.aten.contiguous.default,
}
"""Operators that return their very input if it is already as asked."""


def returns_its_input(node: fx.Node) -> bool:
    """Whether an operator of NO_EFFECT had none."""
    source = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], fx.Node) else None
    if node.target not in NO_EFFECT or not isinstance(source, Tensor) or node.kwargs.get("copy"):
        return False
    value = node.meta["val"]
    return (value.dtype, value.device, value.stride()) == (source.dtype, source.device, source.stride())


def _run(shadow: Shadow, call: Call, inputs: Sequence[GraphInput], flat: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
    """Call the shadow on the traced tensors. Returns its output, and its cache with what was put into it."""
    arguments, cached = [], []
    for spec, tensor in zip(inputs, flat, strict=True):
        if spec.kind == PARAMETER:
            entry = shadow.plan.by_name[spec.name]
            for name in (entry.fqn, *entry.aliases):
                owner, _, attribute = name.rpartition(".")
                shadow.modules[owner]._parameters[attribute] = tensor
        elif spec.kind == BUFFER:
            owner, _, attribute = spec.name.rpartition(".")
            shadow.modules[owner]._buffers[attribute] = tensor
        elif spec.kind == COORDINATE:
            shadow.axes[spec.name].coordinate = tensor
        elif spec.kind == ARGUMENT:
            arguments.append(tensor)
        elif spec.kind in (CACHE, VARYING_CACHE):
            cached.append(tensor)
    keywords = call.with_tensors(arguments)
    if call.cache is None:
        return shadow.module(**keywords), None, cached
    cache = call.cache.copy_with(cached)
    return shadow.module(**keywords, **{call.cache.name: cache}), cache, cached


def state_inputs(shadow: Shadow, model: nn.Module, fake_mode: FakeTensorMode) -> tuple[list[GraphInput], list[Any]]:
    """The graph inputs that are no arguments, with their fakes: parameters in tp-local shape, buffers, coordinates."""
    device, inputs, fakes = shadow.device, [], []
    stored = dict(model.named_parameters())
    with fake_mode:
        for entry in shadow.plan.parameters:
            real = stored[entry.fqn]
            fake = torch.empty(entry.compute_shape, dtype=shadow.plan.compute_dtype(real.dtype), device=device)
            inputs.append(GraphInput(PARAMETER, entry.fqn))
            fakes.append(fake.requires_grad_(real.requires_grad))
        for name, buffer in model.named_buffers():
            inputs.append(GraphInput(BUFFER, name))
            fakes.append(torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
        for axis in ("tp", "ep"):
            if axis in shadow.axes:
                inputs.append(GraphInput(COORDINATE, axis))
                fakes.append(torch.empty((), dtype=torch.int64, device=device))
    return inputs, fakes


def _symbols(fake_mode: FakeTensorMode, call: Call, dynamic: bool, growing: bool) -> dict[str, Any]:
    """Batch, sequence and lengths of the cache: numbers, or symbols whose hints are distinct and above 1, so that none
    is specialised. One token behind a cache stays a number: masks depend on it."""
    env: Any = fake_mode.shape_env
    symbols: dict[str, Any] = {}
    hints: set[int] = set()
    for name, size in call.sizes.items():
        past = name not in ("batch", "sequence")
        one_more = name == "sequence" and size == 1 and call.cache is not None and bool(call.cache.lengths)
        if not (growing if past else dynamic) or one_more:
            symbols[name] = size
            continue
        hint = max(size, 2)
        while hint in hints:
            hint += 1
        hints.add(hint)
        source = ConstantSource(name)
        created = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        symbols[name] = env.create_symintnode(created, hint=hint, source=source)
    return symbols


class _named_modules:
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


def _forget_cache(config: Any) -> None:
    """Graphs have no key-value cache unless asked: see call.py."""
    for part in [config, *(v for v in vars(config).values() if hasattr(v, "use_cache"))]:
        if getattr(part, "use_cache", None):
            part.use_cache = False


READS_VALUES = "GuardOnDataDependentSymNode"
"""What the tracer raises where Python asks for the value of a tensor."""


def _explain(error: Exception, model: nn.Module) -> str:
    """The layer, the innermost line of model code, what happened there, and a remedy."""
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
    else:
        remedy = (
            "If this line fixes a global size (heads, vocabulary) that tp cuts, keep the projections of this layer "
            "whole in tp_plan ('colwise_gather_output' in front, 'rowwise_split_input' behind)."
        )
    return (
        f"{type(model).__name__} could not be captured as one graph: layer {getattr(error, 'in_module', '')!r}, "
        f"{frame.filename}:{frame.lineno}: {frame.line}\n  {type(error).__name__}: {message}\n{remedy}"
    )


def _file_of(module: nn.Module) -> str:
    import inspect

    try:
        return inspect.getfile(type(module))
    except TypeError:
        return "<unknown>"
