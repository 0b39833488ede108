"""Capture: the model's forward as one FX graph on fake tensors, in the shapes that one rank computes with.

Parameters are replaced by fakes of their tp-local shape and plan modules emit `redistribute` nodes, so that the graph
is already the rank's program; no DTensor is dispatched in it. Nothing in it depends on the rank: the rank's index is an
input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ndcompile.capture.cache_update import CacheUpdate, traced_update
from ndcompile.capture.call import Call
from ndcompile.capture.graph_input import ARGUMENT, BUFFER, CACHE, COORDINATE, PARAMETER, VARYING_CACHE, GraphInput
from ndcompile.capture.parameter_writes import ParameterWrite
from ndcompile.capture.shadow import Shadow
from ndcompile.capture.trace_graph import named_modules, trace
from ndcompile.errors import CaptureError
from ndcompile.private.tracing import ConstantSource, DimDynamic, FakeTensorMode, ShapeEnv
from ndcompile.private.transformers import grouped_heads, marked_auxiliary_loss, unpacked_positions


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
    def parameter_writes(self) -> tuple[ParameterWrite, ...]:
        """What a call does to stored parameters before the graph runs."""
        return self.module.meta["parameter_writes"]

    @property
    def placeholders(self) -> list[fx.Node]:
        return self.module.graph.find_nodes(op="placeholder")

    @property
    def cache_nodes(self) -> dict[str, fx.Node]:
        """The tensors of the cache, by path: those that the graph takes, or returns in their places."""
        outputs: Any = self.module.graph.output_node().args[0]
        paths = [] if self.cache is None else self.cache.outputs()
        given = {n.meta["input"].name: n for n in self.placeholders if n.meta["input"].kind in (CACHE, VARYING_CACHE)}
        given = {path: node for path, node in given.items() if isinstance(node.meta["val"], Tensor)}
        return given | dict(zip(paths, outputs[self.returned :], strict=True))

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


def capture(shadow: Shadow, model: nn.Module, call: Call, dynamic: bool, growing: bool = True) -> Captured:
    """Trace one call of `model` (for its training flags, dtypes and requires_grad) on `shadow`.

    `dynamic` makes batch and sequence symbolic, `growing` the lengths of a key-value cache. Modules whose control flow
    depends on data become opaque nodes, see `opaque.py`. Raises CaptureError with the user's source line for
    such control flow outside of an inner module, shapes that do not fit, and whatever else stops the trace.
    """
    while True:
        shadow.opaque.install(shadow)
        try:
            return _capture(shadow, model, call, dynamic, growing)
        except CaptureError as error:
            if not shadow.opaque.add(error, shadow):
                raise


def _capture(shadow: Shadow, model: nn.Module, call: Call, dynamic: bool, growing: bool) -> Captured:
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
            varying = call.cache.shards.varying
            inputs += [GraphInput(VARYING_CACHE if name in varying else CACHE, name) for name in call.cache.names]
            fakes += call.cache.fakes(call.batch, symbols, shadow.device)
    results: list[tuple[Any, ...]] = []

    def program(*flat: Any) -> list[Any]:
        shadow.dropped.clear()
        output, cache, cached = _run(shadow, call, inputs, flat)
        leaves, spec = pytree.tree_flatten(output, is_leaf=lambda leaf: leaf is cache and cache is not None)
        place = next((number for number, leaf in enumerate(leaves) if cache is not None and leaf is cache), None)
        update, kept = (None, []) if cache is None else traced_update(cache, call.cache, cached)  # type: ignore[arg-type]
        results.append((spec, update, place))
        return [leaf for number, leaf in enumerate(leaves) if number != place] + list(shadow.dropped.values()) + kept

    with ExitStack() as stack:
        stack.enter_context(named_modules(shadow.module))
        stack.enter_context(marked_auxiliary_loss(shadow.module))
        stack.enter_context(grouped_heads())
        if "position_ids" not in call.names:
            stack.enter_context(unpacked_positions())
        module = trace(program, inputs, fakes, fake_mode, shadow.module)
    _drop_unread_counts(module.graph)
    spec, update, place = results[-1]
    captured = Captured(module, spec, fake_mode, symbols, call.shapes, tuple(shadow.dropped), update, place)
    module.graph.output_node().meta["returned"] = captured.returned
    return captured


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
    cache = call.cache.copy_with(cached, shadow.device)
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
    """Batch, sequence and sizes of the cache: numbers, or symbols whose hints are distinct and above 1, so that none is
    specialised."""
    env: Any = fake_mode.shape_env
    symbols: dict[str, Any] = {}
    hints: set[int] = set()
    for name, size in call.sizes.items():
        if not _varies(name, size, call, dynamic, growing):
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


def _varies(name: str, size: int, call: Call, dynamic: bool, growing: bool) -> bool:
    """Whether a size is a symbol. One token behind a cache stays a number: masks depend on it. So do batch and capacity
    of a static cache, whose shapes are fixed; what it counts as numbers would be another graph every token."""
    static = call.cache is not None and call.cache.static
    kind = name.rstrip("0123456789")
    if kind == "sequence" and size == 1 and call.cache is not None and call.cache.holds_tensors:
        return False
    return {"batch": dynamic and not static, "sequence": dynamic, "past": growing or static, "capacity": False}[kind]


def _drop_unread_counts(graph: fx.Graph) -> None:
    """Counts that only decided which branch the trace took are no inputs, so that a graph has no sizes that change."""
    for node in graph.find_nodes(op="placeholder"):
        if node.meta["input"].kind == CACHE and not isinstance(node.meta["val"], Tensor) and not node.users:
            graph.erase_node(node)
