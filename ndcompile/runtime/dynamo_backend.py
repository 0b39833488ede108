"""`torch.compile(model, backend="ndcompile")` for a model that `ndcompile.prepare` sharded.

Dynamo traces `model.forward`, which is `traced_forward`: it runs the shadow of the model, in the shapes of one rank.
The backend is given that graph, finds the prepared model by its stand-ins, and goes on as `ndcompile.compile` does:
passes, verifier, lowering, and the same stored parameters. Dynamo keeps the guards and decides when to compile again.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from ndcompile.capture.call import bind
from ndcompile.capture.capture import capture
from ndcompile.capture.dynamo_capture import StandIns, capture_from_dynamo, read_inputs, stood_for
from ndcompile.capture.shadow import Shadow
from ndcompile.capture.signature import model_state
from ndcompile.errors import NdcompileError, UnsupportedError
from ndcompile.passes.complete_boundaries import complete_boundaries
from ndcompile.passes.reduce_statistics import reduce_statistics
from ndcompile.private.dynamo import (
    RefusedCall,
    compiled_frame,
    dynamo_fake_mode,
    error_on_graph_break,
    patch_dynamo_config,
)
from ndcompile.private.transformers import CACHE_NAMES
from ndcompile.progress import stages
from ndcompile.proof.check import Prover
from ndcompile.proof.made import run_marked
from ndcompile.runtime.compiled_model import CompiledModel, Signature
from ndcompile.runtime.repeated_options import check_repeated

STATE = ("requires_grad", "dtypes", "attention", "experts", "outputs")
"""What the graph depends on and Dynamo, which sees stand-ins, does not watch."""


def backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str = ""
) -> Callable[..., Sequence[Any]]:
    """The torch.compile backend, found by its name through the entry points of `torch_dynamo_backends`.

    options: nothing, or the arguments that `ndcompile.prepare` was given (mesh, distributed_config, checkpoint, ...).

    Raises NdcompileError for a model that was not prepared, and for options that differ from its preparation.
    """
    owners = stood_for(gm.graph)
    if not owners:
        raise NdcompileError(
            'torch.compile(backend="ndcompile") was given a model that is not sharded. Its parameters must be sharded '
            "before the trace: call ndcompile.prepare(model, mesh, checkpoint=...) first, and build the optimizer "
            "after it. Or the function around a prepared model breaks into several graphs, of which this one has no "
            "model: compile with fullgraph=True to see where."
        )
    if len(owners) > 1:
        raise UnsupportedError(
            f"The compiled function calls {len(owners)} prepared models. Compile each of them by itself."
        )
    prepared = owners[0]
    with prepared.compiled.agreement.refusing():  # the others may have been given options that agree
        if mode:
            raise NdcompileError(f"mode={mode!r} of torch.compile is one of inductor's own backend. {MODE}")
        check_repeated(options or {}, prepared.options)
    return prepared.compile(gm)


class Prepared:
    """What Dynamo traces of a model, and how the backend compiles it.

    options: the arguments of `ndcompile.prepare`.
    """

    def __init__(self, compiled: CompiledModel, options: Mapping[str, Any]) -> None:
        self.compiled, self.options = compiled, dict(options)
        self.statistics_checked = False
        self.shadow = Shadow(compiled.model, compiled.plan, compiled.mesh)
        self.stand_ins = StandIns(self.shadow, compiled.model, self)

    def follow(self) -> None:
        """Bring shadow and stand-ins to the state of the model; runs when Dynamo traces, outside of the graph."""
        self.shadow.follow(self.compiled.model)
        self.stand_ins.follow(self.compiled.model)

    def refuse_statistics(self) -> None:
        """Raises UnsupportedError for a model that `reduce_statistics` would rewrite, VerifyError if it refuses it,
        or if the graph is not proven.

        The pass compares a graph with one in global shapes, and Dynamo's is in a rank's shapes alone: so a plain call
        of the model is captured instead, once.
        """
        compiled = self.compiled
        if self.statistics_checked or "tp" not in compiled.mesh.axes:
            return
        ids = torch.zeros(2, 8, dtype=torch.int64, device=compiled.mesh.device)
        call = bind(compiled.__signature__, (ids,), {})
        captured = capture(compiled.shadow, compiled.model, call, dynamic=False)
        before = len(captured.module.graph.nodes)
        context = compiled.pass_context(captured, compiled.whole_capture(call, False))
        prover = Prover(captured.module.graph, context)
        run_marked(reduce_statistics, captured.module.graph, context)
        if len(captured.module.graph.nodes) != before:
            raise UnsupportedError(
                f"{type(compiled.model).__name__} takes statistics over values that tp shards, which torch.compile "
                "cannot make whole. Use ndcompile.compile."
            )
        run_marked(complete_boundaries, captured.module.graph, context)
        prover.check(captured.module.graph, after=complete_boundaries.__name__)
        self.statistics_checked = True

    def compile(self, gm: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        """Dynamo's graph as a callable that takes the inputs of that graph."""
        compiled, agreement = self.compiled, self.compiled.agreement
        self.refuse_statistics()
        read = read_inputs(gm.graph)
        lines = [*read.describe(), *(f"{name}: {value}" for name, value in model_state(compiled.model))]
        key = (compiled_frame(), *lines)
        first = key not in compiled.signatures
        if first:
            seed = agreement.capture_begins(lines, {}, torch.initial_seed())
            compiled.seeds.agree(seed)
            compiled.signatures[key] = Signature([], [])
        signature = compiled.signatures[key]
        step = f"capture{agreement.captures}"
        try:
            with (
                compiled.refusing_beside(signature),
                agreement.step(step),
                stages(dist.get_rank() == 0) as stage,
            ):
                stage(f"reading Dynamo's graph of {type(compiled.model).__name__}")
                captured = capture_from_dynamo(gm, read, self.shadow, compiled.model, dynamo_fake_mode())
                program = compiled.finish(captured, signature, stage, f"The sizes {read.sizes()}")
                signature.programs.append(program)
        finally:
            if not signature.programs:
                del compiled.signatures[key]
        state = _state(compiled.model)
        names = [read.placeholders[position].name for position in read.arguments]
        unchecked = first  # the inputs of tp ranks are compared once a signature

        def run(*flat: Any) -> list[Any]:
            nonlocal unchecked
            agreement.calls += 1
            with agreement.refusing():
                compiled.store.current()
                if _state(compiled.model) != state:
                    raise NdcompileError(CHANGED)
            arguments = [flat[position] for position in read.arguments]
            if unchecked:
                tensors = {n: a for n, a in zip(names, arguments, strict=True) if isinstance(a, Tensor)}
                agreement.same_inputs(f"{step}/first", tensors, 0)
                unchecked = False
            return compiled.run(program, arguments)

        return run


def traced_forward(prepared: Prepared) -> Callable[..., Any]:
    """The forward of a prepared model. Dynamo traces it; called in any other way it raises."""
    model, shadow = prepared.compiled.model, prepared.shadow
    modules = list(model.modules())

    @torch.compiler.assume_constant_result
    def follow(flags: tuple[Any, ...]) -> None:
        """flags: Dynamo guards the constants that it passes, so a change of these compiles again."""
        prepared.follow()

    @torch.compiler.assume_constant_result
    def refuse(error: str) -> None:
        """Ends the trace, and tells the other ranks: they may trace a call that is not refused, or have its graph."""
        prepared.compiled.agreement.calls += 1
        prepared.compiled.agreement.refused(error)
        raise RefusedCall(error)

    def traced(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("use_cache") or any(kwargs.get(name) is not None for name in CACHE_NAMES):
            raise UnsupportedError(CACHE)
        follow(tuple((module.training, getattr(module, "gradient_checkpointing", False)) for module in modules))
        for name, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, Tensor) and not value.numel():
                raise ValueError(f"Empty input: argument {name!r} has no elements, so there is no step to compute.")
        args, kwargs = tuple(map(_marked, args)), {name: _marked(value) for name, value in kwargs.items()}
        with patch_dynamo_config(capture_scalar_outputs=True):  # the numbers of rows that ranks exchange
            return shadow.module(*args, **kwargs)

    @functools.wraps(type(model).forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            raise NdcompileError(f"{type(model).__name__} was {PREPARED}")
        with error_on_graph_break(True):
            try:
                return traced(*args, **kwargs)
            except Exception as error:
                values = ", ".join([f"{value}" for value in error.args])  # sizes that are symbols become numbers
                refuse(f"{type(error).__name__}: {values}")

    # Dynamo keeps what it learned of sizes, and counts compilations, by a function's code, file, line and name: every
    # model needs a name of its own.
    unique = re.sub(r"\W", "_", f"forward_{prepared.compiled.agreement.prefix}")
    found: Any = forward
    found.__code__ = found.__code__.replace(co_name=unique)
    found.prepared = prepared
    found.__signature__ = inspect.signature(type(model).forward.__get__(model))
    return found


def _marked(value: Any) -> Any:
    """An argument as the graph goes on with it: no other backend can run past `needs_backend`."""
    if not isinstance(value, Tensor) or value.is_floating_point():
        return value
    return torch.ops.ndcompile.needs_backend.default(value)


PREPARED = (
    'prepared for torch.compile. Call it through torch.compile(model, backend="ndcompile"); or use ndcompile.compile '
    "instead of ndcompile.prepare. Or Dynamo gave it up, as after torch._dynamo.config.recompile_limit sizes with "
    "dynamic=False: fullgraph=True says why."
)
MODE = "Leave it out: `lowering` of ndcompile.prepare, or `cuda_graphs` of ndcompile.compile, is what it has instead."
CHANGED = (
    "requires_grad or dtype of parameters, or the config's implementations or outputs, changed after torch.compile "
    "traced the model. Call torch.compiler.reset(), so that it is traced again."
)
CACHE = "A prepared model has no key-value cache: call it without cache and use_cache. ndcompile.compile has one."


def _state(model: nn.Module) -> tuple[Any, ...]:
    return tuple(value for name, value in model_state(model) if name in STATE)
