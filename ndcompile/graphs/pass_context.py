"""What a pass may know besides the graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ndcompile.graphs.recompute_choice import Choice, Stages, alone
from ndcompile.mesh import Axis, StorageMesh
from ndcompile.plans.sharding_plan import ShardingPlan
from ndcompile.private.tracing import FakeTensorMode
from ndcompile.runtime.accumulation import REDUCED


@dataclass(frozen=True)
class PassContext:
    """The plan, the mesh, the dtypes in which parameters are stored now, and the fake mode of the capture.

    checkpointed: FQNs of layers whose activations are recomputed in backward, in order.
    gradients: whether the graph reduces them, holds them, or adds those held before, see `accumulation.py`.
    verify: what happens to a graph that is not proven, see `ndcompile.proof.check`.
    layers: FQNs of the layers that could be recomputed, in order. memory_budget: bytes that forward may save, if given.
    agree_on_recompute: what the ranks make of this one's choice.
    offloads: parameters live in host memory, see `host_copies.py`. disabled: names of passes that are left out.
    whole_graph: captures the same call in global shapes, on a tp axis of one rank; None where that was checked before.
    """

    plan: ShardingPlan
    mesh: StorageMesh
    stored_dtypes: Mapping[str, torch.dtype]
    fake_mode: FakeTensorMode
    checkpointed: tuple[str, ...] = ()
    whole_graph: Callable[[], fx.Graph] | None = None
    gradients: str = REDUCED
    verify: str = "error"
    layers: tuple[str, ...] = ()
    memory_budget: int | None = None
    agree_on_recompute: Callable[[Choice], Stages] = alone
    offloads: bool = False
    disabled: Collection[str] = ()

    def axis(self, name: str) -> Axis | None:
        """An axis of the mesh; None when its size is 1."""
        return self.mesh.axes.get(name)

    @property
    def mean(self) -> str:
        return self.mesh.mean

    def fake(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        requires_grad: bool = False,
        device: torch.device | None = None,
    ) -> Tensor:
        """A fake tensor, on the mesh's device unless another is given."""
        with self.fake_mode:
            return torch.empty(shape, dtype=dtype, device=device or self.mesh.device).requires_grad_(requires_grad)
