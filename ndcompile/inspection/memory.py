"""Bytes that a rank holds: of parameters, gradients and optimizer from the plan, of activations from the graphs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import fx

from ndcompile.graphs.saved_activations import saved_activations
from ndcompile.inspection.report import Figure
from ndcompile.inspection.storages import Storages
from ndcompile.inspection.trace import Traced, module_of
from ndcompile.operators.host_copies import BACK, COPY
from ndcompile.plans.sharding_plan import ParameterPlan

MOMENTS = 2
"""Tensors that AdamW keeps for each parameter."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. copied: to the device and back in a step, where states live in host memory; else None."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    peak: int
    copied: tuple[int, int] | None = None

    def figures(self, optimizer_dtype: torch.dtype | None) -> tuple[Figure, ...]:
        """The numbers with their formulas."""
        kind = "the parameter's dtype" if optimizer_dtype is None else _spell(optimizer_dtype)
        on_host = "" if self.copied is None else "in host memory: "
        states = "parameters + optimizer + " if self.copied is None else ""
        return (
            Figure(
                "parameters", self.parameters, f"{on_host}sum of local shape x bytes of the dtype, padding included"
            ),
            Figure("gradients", self.gradients, f"{on_host}the same over the parameters that are trained"),
            Figure(
                "optimizer",
                self.optimizer,
                f"{on_host}AdamW: {MOMENTS} x local shape x bytes of {kind}, over the parameters that are trained; "
                "step counts (4 bytes a tensor) left out",
            ),
            Figure(
                "activations",
                self.activations,
                "what the lowered forward graph keeps for the backward graph, parameters and inputs left out, each "
                "memory once",
            ),
            Figure(
                "peak",
                self.peak,
                f"{states}the largest sum of what is alive at a node of the forward or the backward "
                "graph: activations, outputs, gradients so far, values that one kernel writes and another reads (fused "
                "operators keep theirs), gathered weights from their first use to their last",
            ),
            *self._copies(),
        )

    def _copies(self) -> Iterable[Figure]:
        if self.copied is not None:
            yield Figure("copied to the device", self.copied[0], "shards of a step: in forward, and again in backward")
            yield Figure("copied to the host", self.copied[1], "reduced gradients of a step")


def memory(traced: Traced, optimizer_dtype: torch.dtype | None = None) -> Memory:
    """Bytes of a training step that starts without gradients; `optimizer_dtype` is that of AdamW's moments."""
    trained = [p for p in traced.plan.parameters if p.fqn not in traced.frozen]
    parameters = sum(stored_bytes(p) for p in traced.plan.parameters)
    optimizer = MOMENTS * sum(stored_bytes(p, optimizer_dtype) for p in trained)
    saved = saved_activations(traced.forward.graph, traced.backward.graph)
    offloads = traced.plan.cpu_offload
    return Memory(
        parameters=parameters,
        gradients=sum(stored_bytes(p) for p in trained),
        optimizer=optimizer,
        activations=sum(_bytes(traced, node) * traced.times(node) for node in saved.values()),
        peak=Alive.of(traced).peak() + (0 if offloads else parameters + optimizer),
        copied=(_copied(traced, COPY), _copied(traced, BACK)) if offloads else None,
    )


def _copied(traced: Traced, kind: object) -> int:
    """Bytes of the copies of a step."""
    nodes = [node for gm in (traced.forward, traced.backward) for node in gm.graph.nodes if node.target is kind]
    return sum(_bytes(traced, node) * traced.times(node) for node in nodes)


def stored_bytes(entry: ParameterPlan, dtype: torch.dtype | None = None) -> int:
    """Bytes of a rank's buffer of a parameter, or of one like it in another dtype."""
    return prod(entry.storage_shape) * (dtype or entry.dtype).itemsize


@dataclass(frozen=True)
class Alive:
    """What a step has alive besides parameters and moments.

    forward: most bytes at a node of the forward graph, without buffers and inputs. order, backward: the nodes of the
    backward graph, and its memories: what forward kept and the gradients of the outputs at first.
    """

    traced: Traced
    forward: int
    order: Sequence[fx.Node]
    backward: Sequence[_Life]

    @classmethod
    def of(cls, traced: Traced) -> Alive:
        forward, backward = (Storages(gm.graph, traced.size) for gm in (traced.forward, traced.backward))
        births = {node: index for index, node in enumerate(forward.order) if node.op != "placeholder"}
        lives = [_life(traced, forward, node, births[node], node) for node in forward.death if node in births]
        saved = saved_activations(traced.forward.graph, traced.backward.graph)
        return cls(
            traced, _peak(traced, forward.order, lives), backward.order, list(_backward_lives(traced, backward, saved))
        )

    def peak(self, gradients: float = 1.0) -> int:
        """Most bytes alive at a node. gradients: how large those of parameters are, in parts of the traced ones."""
        lives = [
            replace(life, nbytes=int(life.nbytes * gradients))
            if life.birth >= 0 and life.death >= len(self.order)
            else life
            for life in self.backward
        ]
        return max(self.forward, _peak(self.traced, self.order, lives))


def _backward_lives(traced: Traced, storages: Storages, saved: Mapping[str, fx.Node]) -> Iterable[_Life]:
    for index, node in enumerate(storages.order):
        held = node.name in saved or node.name.startswith("tangents")
        if node in storages.death and (node.op != "placeholder" or held):
            birth = index if node.op != "placeholder" else -1
            yield _life(traced, storages, node, birth, saved.get(node.name, node))


@dataclass(frozen=True)
class _Life:
    """A memory. birth, death: nodes by number; -1, and the number of nodes, for what comes from before and what stays.

    layer: the traced layer that it belongs to, None outside of them. times: how many there are.
    """

    nbytes: int
    birth: int
    death: int
    layer: int | None
    times: int


def _life(traced: Traced, storages: Storages, node: fx.Node, birth: int, holder: fx.Node) -> _Life:
    nbytes, module = 0 if holder.target is BACK else traced.nbytes(holder.meta["val"]), module_of(holder)
    return _Life(nbytes, birth, storages.death[node], traced.stack.index(module), traced.times(holder))


def _peak(traced: Traced, order: Sequence[fx.Node], lives: Sequence[_Life]) -> int:
    """Most bytes alive at a node.

    Where a traced layer stands for others they run right after it: what they took from before is gone then, and what
    they leave is there.
    """
    count = len(order)
    change = [0] * (count + 2)
    lasting: dict[int, int] = {}
    more = 0
    for life in lives:
        change[max(life.birth, 0)] += life.nbytes
        change[life.death + 1] -= life.nbytes
        if life.times > 1 and life.layer is not None:
            others = (life.times - 1) * life.nbytes
            more += others if life.birth < 0 else 0
            kept = (life.death >= count) - (life.birth < 0)
            lasting[life.layer] = lasting.get(life.layer, 0) + kept * others
    alive = list(itertools.accumulate(change))
    stretches = {
        stop: (start, sum(lasting.get(n, 0) for n in layers)) for start, stop, layers in _stretches(traced, order)
    }
    peak = 0
    for index in range(count + 1):
        if index in stretches:
            start, left = stretches[index]
            more += left
            peak = max(peak, max(alive[start:index], default=0) + more)
        peak = max(peak, alive[index] + more) if index < count else peak
    return peak


def _stretches(traced: Traced, order: Sequence[fx.Node]) -> Iterable[tuple[int, int, list[int]]]:
    """(first node, node behind, layers) of the stretches of a graph that stand for more than one unit each."""
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    groups: dict[tuple[int, int], list[int]] = {}
    for index, node in enumerate(order):
        layer = traced.stack.index(module_of(node))
        if node.op == "call_function" and layer is not None:
            if layer not in first:
                first[layer] = index
                groups.setdefault(traced.stack.stretch(layer), []).append(layer)
            last[layer] = index
    for (_, times), layers in groups.items():
        if times > 1:
            yield min(first[n] for n in layers), max(last[n] for n in layers) + 1, layers


def _bytes(traced: Traced, node: fx.Node) -> int:
    return traced.nbytes(node.meta["val"])


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
