"""Gradient accumulation without communication: `no_sync`.

A micro-batch under `no_sync` keeps the gradients of whole (tp-local) weights on its rank, in `HeldGradients`; the first
backward outside of it adds them to its own before the ranks' reduction, inside the graph. So a step of n micro-batches
reduces once, and holds a gradient of each whole weight until then. The graphs differ by one pass, `hold_gradients`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ndcompile.capture.graph_input import HELD, GraphInput
from ndcompile.errors import NdcompileError, UnsupportedError
from ndcompile.parameters.storage import ParameterStore, Slot
from ndcompile.plans.sharding_plan import ParameterPlan

REDUCED, HOLD, ADD_HELD = "reduced", "held", "reduced with those held"
"""What a graph does with gradients."""


class HeldGradients:
    """Sums of gradients that wait for their reduction, by FQN, of whole weights in the dtype they are stored in.

    While it holds some, an optimizer of these parameters raises at `step`: their gradients would be missing there.
    """

    def __init__(self, store: ParameterStore) -> None:
        self.store = store
        self.sums: dict[str, Tensor] = {}
        self.hook = register_optimizer_step_pre_hook(self._refuse_step)

    def add(self, name: str, gradient: Tensor) -> None:
        known = self.sums.get(name)
        # Contiguous, as the graph that adds it was compiled for.
        self.sums[name] = (gradient if known is None else known + gradient).contiguous()

    def drop(self) -> None:
        """Forget the sums; this object is of no use afterwards."""
        self.sums = {}
        self.hook.remove()

    def _refuse_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = {id(slot.parameter): name for slot in self.store.slots if (name := slot.entry.fqn) in self.sums}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in held:
                    raise NdcompileError(
                        f"The gradient of {held[id(parameter)]!r} is still held by no_sync: this step would miss it. "
                        "Run the last micro-batch, forward and backward, outside of no_sync."
                    )


class Accumulation:
    """Whether a compiled model holds gradients now, and what it holds."""

    def __init__(self) -> None:
        self.active = False
        self.held: HeldGradients | None = None

    @property
    def mode(self) -> str:
        """What the graph of the next call does with gradients."""
        if not torch.is_grad_enabled():
            return REDUCED
        return HOLD if self.active else REDUCED if self.held is None else ADD_HELD

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `ndcompile.no_sync`."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before

    def inputs(self, specs: Sequence[GraphInput], store: ParameterStore) -> dict[str, Tensor]:
        """The graph's inputs of kind HELD, by FQN: where gradients go to, or the sums that are added.

        Raises UnsupportedError if gradients are held that this graph does not reduce.
        """
        names = [spec.name for spec in specs if spec.kind == HELD]
        slots = [slot for slot in store.slots if slot.entry.fqn in set(names)]
        if self.mode == HOLD:
            parameters = (slot.parameter for slot in slots)
            holders = _Holders.apply(self, store, slots, *parameters) if slots else ()
            return {slot.entry.fqn: holder for slot, holder in zip(slots, holders, strict=True)}
        sums = {} if self.held is None or self.mode == REDUCED else self.held.sums
        if missed := sums.keys() - set(names):
            raise UnsupportedError(
                f"no_sync holds a gradient of {min(missed)!r}, which this call does not use: it would not be reduced. "
                "End a step with a call of the same kind as its micro-batches, or drop what is held with "
                "ndcompile.drop_held_gradients(model)."
            )
        return {slot.entry.fqn: sums.get(slot.entry.fqn, _zeros(slot, store.mesh.device)) for slot in slots}

    def consumer(self) -> Consumer | None:
        """What a backward tells that it has added the sums; None if this call adds none."""
        return Consumer(self, self.held) if self.mode == ADD_HELD and self.held is not None else None

    def drop(self) -> None:
        """See `ndcompile.drop_held_gradients`."""
        if self.held is not None:
            self.held.drop()
            self.held = None


class Consumer:
    """The sums as they were at a forward, which its backward adds."""

    def __init__(self, accumulation: Accumulation, held: HeldGradients) -> None:
        self.accumulation, self.held, self.sums = accumulation, held, dict(held.sums)

    def consumed(self) -> None:
        """Raises UnsupportedError if they were added before, or if more has been held since that forward."""
        now = self.held.sums
        if self.accumulation.held is not self.held or any(now[name] is not self.sums.get(name) for name in now):
            raise UnsupportedError(
                "Gradients held by no_sync were added by another backward, or came after this forward: the gradients "
                "of this step are wrong. Between the micro-batches under no_sync and the backward that reduces, run "
                "one forward and its backward only."
            )
        self.accumulation.drop()


class _Holders(torch.autograd.Function):
    """Tensors without memory in the shape of whole weights: what their gradients are is held."""

    @staticmethod
    def forward(ctx, accumulation: Accumulation, store: ParameterStore, slots: list[Slot], *parameters: Tensor):
        ctx.accumulation, ctx.store, ctx.slots = accumulation, store, slots
        ctx.set_materialize_grads(False)
        return tuple(holder(_shape(s), s.buffer.dtype, store.mesh.device) for s in slots)

    @staticmethod
    def backward(ctx, *gradients: Tensor | None):
        accumulation = ctx.accumulation
        for slot, gradient in zip(ctx.slots, gradients, strict=True):
            if gradient is not None:
                if accumulation.held is None:
                    accumulation.held = HeldGradients(ctx.store)
                accumulation.held.add(slot.entry.fqn, gradient)
        return None, None, None, *(None for _ in gradients)


def holder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A graph's input whose gradient is held: zeros without memory of their own, all strides 0."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def _zeros(slot: Slot, device: torch.device) -> Tensor:
    return torch.zeros(_shape(slot), dtype=slot.buffer.dtype, device=device)


def _shape(slot: Slot) -> tuple[int, ...]:
    entry: ParameterPlan = slot.entry
    return tuple(entry.compute_shape)
