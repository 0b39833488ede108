"""What a graph is called with: parameters, buffers, seeds and the caller's tensors, in the order of its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ndcompile.capture.graph_input import BUFFER, CACHE, COORDINATE, HELD, PARAMETER, SEEDS, VARYING_CACHE, GraphInput
from ndcompile.errors import NdcompileError
from ndcompile.mesh import StorageMesh
from ndcompile.operators.host_copies import Finishing
from ndcompile.operators.random_ops import stream_seed
from ndcompile.parameters.storage import ParameterStore
from ndcompile.runtime.accumulation import Accumulation


class Seeds:
    """Seeds of random operators, new ones at every step; `start` is what the ranks agreed on at the first capture."""

    def __init__(self, mesh: StorageMesh) -> None:
        self.mesh, self.steps = mesh, 0
        self.start: int | None = None

    def agree(self, start: int) -> None:
        """The first seed stays."""
        self.start = start if self.start is None else self.start

    def next(self) -> Tensor:
        """Seeds of this step: one that the tp group shares, one of this rank; both differ between data ranks."""
        assert self.start is not None
        self.steps += 1
        stream = (self.start, self.steps, self.mesh.data_rank)
        seeds = [stream_seed(*stream), stream_seed(*stream, self.mesh.coordinate("tp"))]
        return torch.tensor(seeds, device=self.mesh.device)


class GraphArguments:
    """Puts together the inputs of the graphs of one model."""

    def __init__(self, model: nn.Module, mesh: StorageMesh, store: ParameterStore, accumulation: Accumulation) -> None:
        self.model, self.mesh, self.store, self.accumulation = model, mesh, store, accumulation
        self.coordinates = {name: torch.tensor(axis.coordinate, device=mesh.device) for name, axis in mesh.axes.items()}

    def of(
        self, inputs: Sequence[GraphInput], arguments: Sequence[Any], cached: Mapping[str, Any], seeds: Seeds
    ) -> list[Any]:
        """arguments: the caller's tensors and sizes, in order. cached: what a cache holds, by path."""
        consumer = self.accumulation.consumer()
        parameters = iter(self.store.local_tensors(None if consumer is None else consumer.consumed))
        held = self.accumulation.inputs(inputs, self.store)
        given = iter(arguments)
        values = []
        for spec in inputs:
            if spec.kind == PARAMETER:
                values.append(next(parameters))
            elif spec.kind == BUFFER:
                values.append(self._buffer(spec.name))
            elif spec.kind == COORDINATE:
                values.append(self.coordinates[spec.name])
            elif spec.kind == HELD:
                values.append(held[spec.name])
            elif spec.kind == SEEDS:
                values.append(seeds.next())
            elif spec.kind in (CACHE, VARYING_CACHE):
                values.append(self._argument(spec.name, cached[spec.name]))
            else:
                values.append(self._argument(spec.name, next(given)))
        return values

    def _buffer(self, name: str) -> Tensor:
        buffer = self.model.get_buffer(name)
        if buffer.is_meta:
            raise NdcompileError(f"Buffer {name!r} is not loaded: call ndcompile.load(model, folder) first.")
        return buffer

    def _argument(self, name: str, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if tensor.ndim and tensor.device.type != self.mesh.device.type:
            if not self.store.pinned:
                raise ValueError(f"Argument {name} is on {tensor.device}, the model on {self.mesh.device}.")
            tensor = tensor.to(self.mesh.device)  # `generate` puts tokens where the parameters are; fully_shard does so
        if self.store.pinned and tensor.requires_grad and torch.is_grad_enabled():
            tensor = Finishing.apply(tensor, self.mesh.device)  # backward may copy parameters that have no gradients
        return tensor.contiguous()
