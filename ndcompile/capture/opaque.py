"""Modules whose code branches on the values of tensors: each runs as one node of the graph, see `opaque_operator`.

There is no break in the graph: what is before and behind such a node is captured, sharded and compiled as ever. Its
inputs must be whole, and the same on all ranks of a tp group; its parameters are gathered over the data axes as any
other, and over tp where a plan shards them, so that their gradients are reduced as ever. The collectives and boundaries
of plan modules within it are left out with their shards.

Which modules these are is found by the capture: the innermost one around a line that cannot be traced whose output has
a shape that does not depend on values, and those like it in other layers. The log "ndcompile.opaque" warns of them, as
nothing of their inside is compiled or overlapped.
"""

from __future__ import annotations

import copy
import logging
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import Shard
from torch.utils import _pytree as pytree

from ndcompile.capture.opaque_operator import PLAIN, TENSOR, OpaqueOperator, OutputUnknown, Signature
from ndcompile.capture.signature import config_state
from ndcompile.errors import CaptureError, UnsupportedError
from ndcompile.plans.sharding_plan import ParameterPlan, generic
from ndcompile.private.distributed import StridedShard
from ndcompile.private.tracing import GuardOnDataDependentSymNode, ModulesGiven, outside_of_tracing
from ndcompile.private.transformers import copy_config_flags

if TYPE_CHECKING:
    from ndcompile.capture.shadow import Shadow

_logger = logging.getLogger("ndcompile.opaque")

UNTRACEABLE = (GuardOnDataDependentSymNode, ModulesGiven)
"""What a line raises that branches on values, and one that hands modules to an autograd Function."""

_DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


class OpaqueModules:
    """The opaque modules of a model, and their operators. The shadows with and without tp share them.

    model: without weights and wrappers. lines: FQN -> the line that made a module opaque.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.lines = model, dict[str, str]()
        self.operators: dict[object, OpaqueOperator] = {}

    def add(self, error: CaptureError, shadow: Shadow) -> bool:
        """Make the module opaque that an error of a capture is about; whether there is one, and was not before.

        One whose experts exchange tokens cannot be: its collectives have to be nodes, and every rank has to reach them.
        """
        cause, fqn = error.__cause__, getattr(error.__cause__, "in_module", "")
        if isinstance(cause, OutputUnknown):  # then what is around it, whose output may be known
            line, fqn = self.lines[fqn], fqn.rpartition(".")[0]
        elif isinstance(cause, UNTRACEABLE):
            line = str(error).partition("could not be captured as one graph: ")[2].partition("\n")[0]
        else:
            return False
        if not fqn or fqn in self.lines:
            return False
        exchanged = [f"{plan.fqn}." for plan in shadow.plan.experts]
        if any(name.startswith(f"{fqn}.") or f"{fqn}.".startswith(name) for name in exchanged):
            return False
        modules = dict(self.model.named_modules())
        alike = [
            name
            for name, module in modules.items()
            if generic(name) == generic(fqn) and type(module) is type(modules[fqn])
        ]
        self.lines.update(dict.fromkeys(alike, line))
        if not dist.is_initialized() or dist.get_rank() == 0:
            _logger.warning("%s", describe(self.model, alike, line))
        return True

    def notes(self) -> list[str]:
        """What to tell of the opaque modules, a line for those that are alike."""
        groups: dict[tuple[str, str], list[str]] = {}
        for name, line in self.lines.items():
            groups.setdefault((generic(name), line), []).append(name)
        return [describe(self.model, names, line) for (_, line), names in groups.items()]

    def install(self, shadow: Shadow) -> None:
        """Let the forward of the opaque modules of `shadow` be their operator's."""
        for fqn in self.lines:
            shadow.modules[fqn].forward = _Forward(self, shadow, fqn)

    def operator(self, fqn: str, shadow: Shadow, signature: Signature, tensors: list[Tensor]) -> OpaqueOperator:
        """The one for this way to call a module."""
        sources = list(shadow.modules[fqn].modules())
        flags = (tuple(source.training for source in sources), config_state(shadow.modules[fqn]))
        key = (fqn, repr(signature), flags, tuple((str(t.shape), t.dtype) for t in tensors))
        if key not in self.operators:
            with outside_of_tracing():
                module = copy.deepcopy(self.model.get_submodule(fqn))
            for part, source in zip(module.modules(), sources, strict=True):
                part.training = source.training
                copy_config_flags(source, part)
            self.operators[key] = OpaqueOperator(fqn, module, signature, tensors)
        return self.operators[key]


class _Forward:
    """In the place of an opaque module's forward, in a capture."""

    def __init__(self, opaque: OpaqueModules, shadow: Shadow, fqn: str) -> None:
        self.opaque, self.shadow, self.fqn = opaque, shadow, fqn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if other := [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (Tensor, torch.SymInt, *PLAIN))]:
            raise UnsupportedError(
                f"{self.fqn!r} runs as one opaque node ({self.opaque.lines[self.fqn]}), which cannot take a "
                f"{other[0]}: tensors and plain values only. A key-value cache is such an object: use_cache=False."
            )
        constants = tuple(
            TENSOR if isinstance(leaf, Tensor) else int(leaf) if isinstance(leaf, torch.SymInt) else leaf
            for leaf in leaves
        )
        parameters, whole = self._parameters()
        names = dict(self.shadow.modules[self.fqn].named_buffers(remove_duplicate=False))
        autocast = tuple(
            (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)) for device in _DEVICES
        )
        signature = Signature(spec, constants, parameters, tuple(names), autocast, "tp" in self.shadow.axes)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)] + whole + list(names.values())
        return self.opaque.operator(self.fqn, self.shadow, signature, tensors)(tensors)

    def _parameters(self) -> tuple[tuple[tuple[str, ...], ...], list[Tensor]]:
        """Names within the module, and whole values, of its parameters; ties are one."""
        found: dict[str, tuple[list[str], Tensor]] = {}
        for owner, module in self.shadow.modules[self.fqn].named_modules():
            for attribute, tensor in module._parameters.items():
                if tensor is not None:
                    name = f"{owner}.{attribute}".lstrip(".")
                    entry = self.shadow.plan.by_name[f"{self.fqn}.{name}"]
                    found.setdefault(entry.fqn, ([], tensor))[0].append(name)
        by_name = self.shadow.plan.by_name
        whole = [self._whole(by_name[fqn], tensor) for fqn, (_, tensor) in found.items()]
        return tuple(tuple(names) for names, _ in found.values()), whole

    def _whole(self, entry: ParameterPlan, tensor: Tensor) -> Tensor:
        """Gathered over tp; each part of a packed shard by itself."""
        if "tp" not in self.shadow.axes or not isinstance(entry.tp, Shard | StridedShard):
            return tensor
        dim, tp = entry.tp.dim, self.shadow.axes["tp"]
        if not isinstance(entry.tp, StridedShard):
            return tp.move(tensor, (f"S({dim})", "I"), entry.shape[dim])
        parts = int(entry.tp.split_factor)
        apart = tensor.unflatten(dim, (parts, tensor.shape[dim] // parts))
        return tp.move(apart, (f"S({dim + 1})", "I"), entry.shape[dim] // parts).flatten(dim, dim + 1)


def is_opaque(node: fx.Node) -> bool:
    """Whether a node runs an opaque module."""
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    return name.startswith("ndcompile::opaque_")


def describe(model: nn.Module, names: list[str], line: str) -> str:
    """One line for modules that are alike."""
    inside = sum(p.numel() for p in model.get_submodule(names[0]).parameters())
    share = inside / max(sum(p.numel() for p in model.parameters()), 1)
    run = f"{names[0]!r} runs as one opaque node"
    if len(names) > 1:
        run = f"{names[0]!r} and {len(names) - 1} more like it run as one opaque node each"
    place = line.partition(", ")[2]
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):  # wherever packages are imported from
        place = place.replace(f"{folder.rstrip('/')}/", "")
    return f"{run}, in eager mode, with whole weights ({share:.0%} of the model at once), because of {place}"
