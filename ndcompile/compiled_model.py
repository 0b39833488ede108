"""Runtime: the object that stands in a compiled model's `forward`.

At each call it binds the arguments, looks up the graph of this signature (or captures, lowers and agrees on a new one),
feeds it the parameters' local buffers, and puts the outputs back into the model's output class.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from ndcompile.call import Call, bind
from ndcompile.capture import BUFFER, COORDINATE, PARAMETER, Captured, Shadow, capture, copy_without_weights
from ndcompile.errors import NdcompileError, UnsupportedError
from ndcompile.loader import LoadReport, Target, buffer_targets, load_into, materialize_buffers
from ndcompile.lower import Compiled, lower, no_autocast
from ndcompile.mesh import StorageMesh
from ndcompile.partition import Partitioner
from ndcompile.pass_context import PassContext
from ndcompile.pipeline import run_passes
from ndcompile.refusals import refuse_inner_calls, refuse_methods
from ndcompile.sharding_plan import build_plan
from ndcompile.signature import checkpointed_layers, model_state
from ndcompile.storage import ParameterStore


@dataclass
class Program:
    """A compiled graph and the sizes that it serves."""

    captured: Captured
    run: Compiled
    graphs: Partitioner


class CompiledModel:
    """Callable that replaces `model.forward`. Holds the plan, the stored parameters, and one Program a signature."""

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: StorageMesh,
        config: DistributedConfig,
        *,
        backend: str,
        dynamic: bool | None,
        disabled: frozenset[str],
    ) -> None:
        self.model, self.mesh, self.backend = model, mesh, backend
        self.dynamic, self.disabled = dynamic, disabled
        self.plan = build_plan(copy_without_weights(model), mesh.sizes, config)
        self.shadow = Shadow(model, self.plan, mesh)
        self.programs: dict[object, list[Program]] = {}
        self.__signature__ = inspect.signature(type(model).forward.__get__(model))

    def bind(self) -> None:
        """Make the model a compiled one: DTensor parameters, this object as forward, refusals in place."""
        model = self.model
        self.store = ParameterStore(model, self.plan, self.mesh)
        model.forward = self  # type: ignore[method-assign]
        model.sharding_plan = self.plan  # type: ignore[assignment]
        refuse_methods(model)
        refuse_inner_calls(model)

    def load(self, folder: str | os.PathLike[str], *, strict: bool = True) -> LoadReport:
        """Read this rank's slices and the buffers."""
        self.store.materialize()
        materialize_buffers(self.model, self.mesh.device)
        targets = [
            Target(slot.entry.fqn, slot.local, slot.entry.shape, *self.store.layout(slot.entry), slot.entry.aliases)
            for slot in self.store.slots
        ]
        _, mesh_shape, coordinate = self.store.layout(self.store.slots[0].entry)
        targets += buffer_targets(self.model, mesh_shape, coordinate)
        return load_into(self.shadow.module, targets, folder, progress=dist.get_rank() == 0, strict=strict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = bind(self.__signature__, args, kwargs)
        self.store.current()
        program = self._program(call)
        inputs = self._inputs(program.captured, call)
        with no_autocast():
            outputs = program.run(*inputs)
        return pytree.tree_unflatten(list(outputs), program.captured.output_spec)

    def _program(self, call: Call) -> Program:
        """The graph that serves this call."""
        key = (call.key(), model_state(self.model))
        known = self.programs.setdefault(key, [])
        for program in known:
            if program.captured.serves(call.batch, call.sequence):
                return program
        dynamic = self.dynamic is True or (self.dynamic is None and len(known) > 0)
        known.append(self._build(call, dynamic))
        return known[-1]

    def _build(self, call: Call, dynamic: bool) -> Program:
        captured = capture(self.shadow, self.model, call, dynamic)
        run_passes(captured, self._pass_context(captured), self.disabled)
        run, graphs = lower(captured, self.backend)
        return Program(captured, run, graphs)

    def _pass_context(self, captured: Captured) -> PassContext:
        dtypes = {slot.entry.fqn: slot.local.dtype for slot in self.store.slots}
        return PassContext(self.plan, self.mesh, dtypes, captured.fake_mode, checkpointed_layers(self.model))

    def _inputs(self, captured: Captured, call: Call) -> list[Tensor]:
        """The graph's inputs in order."""
        parameters = iter(self.store.local_tensors())
        arguments = iter(call.tensors)
        inputs = []
        for node in captured.placeholders:
            spec = node.meta["input"]
            if spec.kind == PARAMETER:
                inputs.append(next(parameters))
            elif spec.kind == BUFFER:
                inputs.append(self._buffer(spec.name))
            elif spec.kind == COORDINATE:
                inputs.append(torch.tensor(self.mesh.coordinate(spec.name), device=self.mesh.device))
            else:
                inputs.append(self._argument(spec.name, next(arguments)))
        return inputs

    def _buffer(self, name: str) -> Tensor:
        buffer = self.model.get_buffer(name)
        if buffer.is_meta:
            raise NdcompileError(f"Buffer {name!r} is not loaded: call ndcompile.load(model, folder) first.")
        return buffer

    def _argument(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.ndim and tensor.device.type != self.mesh.device.type:
            raise ValueError(f"Argument {name} is on {tensor.device}, the model on {self.mesh.device}.")
        return tensor.contiguous()

    def __deepcopy__(self, memo: dict) -> Any:
        raise UnsupportedError(
            "A compiled model cannot be copied. Copy the model before ndcompile.compile, or compile a second one."
        )

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            "A compiled model cannot be pickled. Save its state_dict() with torch.distributed.checkpoint."
        )
