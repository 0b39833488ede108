"""Stored parameters: DTensors on the storage mesh over buffers that are padded to the largest shard.

The optimizer, `state_dict` and DCP see DTensors with plain placements. The graph takes the padded local buffers, whose
shapes are the same on every rank; where sizes divide, buffer and local tensor are one. With offload they are in pinned
host memory, and so are the local tensors of gradients: the mesh of a DTensor says where its ranks are, not its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ndcompile.errors import NdcompileError, UnsupportedError
from ndcompile.mesh import StorageMesh
from ndcompile.operators.host_copies import HOST, finish, host_memory
from ndcompile.parameters.layout import local_shape, narrow
from ndcompile.parameters.packed import of_placements
from ndcompile.plans.sharding_plan import ParameterPlan, ShardingPlan


@dataclass
class Slot:
    """One stored parameter: where the model keeps it, and the buffer behind it.

    `local` is the tensor that the DTensor wraps, a view of `buffer` without its padding.
    """

    entry: ParameterPlan
    owners: tuple[tuple[nn.Module, str], ...]
    parameter: nn.Parameter
    local: Tensor
    buffer: Tensor


class ParameterStore:
    """All stored parameters of a compiled model, in the plan's order."""

    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        mesh: StorageMesh,
        shared: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Replace the model's parameters by DTensors on the meta device; `materialize` gives them memory.

        shared: FQN -> bytes for a buffer, which other GPUs copy from: it stays there.

        `half_loaded` says that a load began and did not end: then the values are of no use.
        """
        self.half_loaded = False
        self.mesh, self.shared = mesh, shared
        self.pinned = plan.cpu_offload and mesh.device.type != "cpu"
        self.device = HOST if self.pinned else mesh.device
        modules = dict(model.named_modules())
        self.tree = [
            (fqn, modules[fqn.rpartition(".")[0]], fqn.rpartition(".")[2], module)
            for fqn, module in modules.items()
            if fqn
        ]
        stored = dict(model.named_parameters())
        self.slots = [self._create(entry, stored[entry.fqn], modules) for entry in plan.parameters]

    def _create(self, entry: ParameterPlan, old: nn.Parameter, modules: dict[str, nn.Module]) -> Slot:
        buffer = torch.empty(entry.storage_shape, dtype=old.dtype, device="meta")
        local = self._without_padding(entry, buffer)
        parameter = nn.Parameter(self._wrap(entry, local), requires_grad=old.requires_grad)
        owners = []
        for name in (entry.fqn, *entry.aliases):
            owner, _, attribute = name.rpartition(".")
            modules[owner]._parameters[attribute] = parameter
            owners.append((modules[owner], attribute))
        return Slot(entry, tuple(owners), parameter, parameter._local_tensor, buffer)  # type: ignore[attr-defined]

    def _wrap(self, entry: ParameterPlan, local: Tensor) -> DTensor:
        axes = self.mesh.device_mesh.mesh_dim_names
        assert axes is not None
        stride = torch.empty(entry.shape, device="meta").stride()
        return of_placements(
            DTensor.from_local(
                local, self.mesh.device_mesh, entry.placements(axes), run_check=False, shape=entry.shape, stride=stride
            )
        )

    def _without_padding(self, entry: ParameterPlan, buffer: Tensor) -> Tensor:
        shape = local_shape(entry.shape, *self.layout(entry))
        return buffer if shape == buffer.shape else narrow(buffer, [0] * buffer.ndim, shape)

    def layout(self, entry: ParameterPlan) -> tuple[tuple, tuple[int, ...], tuple[int, ...]]:
        """Placements, mesh shape and this rank's coordinate of a parameter, as `layout.py` takes them."""
        mesh = self.mesh.device_mesh
        assert mesh.mesh_dim_names is not None
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        return entry.placements(mesh.mesh_dim_names), tuple(mesh.shape), tuple(coordinate)

    @property
    def loaded(self) -> bool:
        return not any(slot.local.is_meta for slot in self.slots)

    def materialize(self) -> None:
        """Give every parameter memory, zeroed where it is padded, keeping the identity of every Parameter object."""
        for slot in self.slots:
            self.materialize_slot(slot)

    def materialize_slot(self, slot: Slot) -> None:
        """`materialize` for one parameter."""
        if not slot.local.is_meta:
            return
        padded = slot.local.shape != slot.entry.storage_shape
        buffer = self._memory(slot.entry, slot.local.dtype, zeros=padded)  # zeros: a pass over memory that is read into
        local = self._without_padding(slot.entry, buffer)
        described = self._wrap(slot.entry, torch.empty_like(local, device="meta"))
        replacement = nn.Parameter(_like(described, local), requires_grad=slot.parameter.requires_grad)
        torch.utils.swap_tensors(slot.parameter, replacement)
        slot.buffer, slot.local = buffer, slot.parameter._local_tensor  # type: ignore[attr-defined]

    def _memory(self, entry: ParameterPlan, dtype: torch.dtype, zeros: bool) -> Tensor:
        """A buffer for a parameter, new but if it is shared."""
        if (shared := self.shared.get(entry.fqn)) is not None:
            buffer = shared.view(dtype).view(entry.storage_shape)
            return buffer.zero_() if zeros else buffer
        if self.pinned:
            return host_memory(tuple(entry.storage_shape), dtype, pinned=True, zeros=zeros)
        return (torch.zeros if zeros else torch.empty)(entry.storage_shape, dtype=dtype, device=self.device)

    def current(self) -> None:
        """Check that the model still holds these parameters, and follow what changed in a way that can be followed.

        Raises NdcompileError when nothing was loaded yet, and UnsupportedError when a parameter was replaced.
        """
        if self.half_loaded:
            raise NdcompileError("The last ndcompile.load failed, so the parameters hold nothing useful. Load again.")
        for fqn, parent, name, module in self.tree:
            if parent._modules.get(name) is not module:
                self._refuse_replaced("Module", fqn, parent._modules.get(name))
        for slot in self.slots:
            for owner, attribute in slot.owners:
                if owner._parameters.get(attribute) is not slot.parameter:
                    self._refuse_replaced("Parameter", slot.entry.fqn, owner._parameters.get(attribute))
            local = slot.parameter._local_tensor  # type: ignore[attr-defined]
            if local is not slot.local:
                self._follow(slot, local)
            if local.is_meta:
                raise NdcompileError(
                    f"Parameter {slot.entry.fqn!r} is not loaded. Pass checkpoint= to ndcompile.compile, or call "
                    "ndcompile.load(model, folder) before the first forward."
                )

    def _follow(self, slot: Slot, local: Tensor) -> None:
        """`.data`, `.to(dtype)` and the like gave the parameter another local tensor: build its buffer again."""
        shape = local_shape(slot.entry.shape, *self.layout(slot.entry))
        if local.shape != shape or local.device.type != self.device.type:
            raise UnsupportedError(
                f"Parameter {slot.entry.fqn!r} now has a local tensor of shape {tuple(local.shape)} on {local.device}; "
                f"the compiled model needs {tuple(shape)} on {self.device}. Compile again after the change."
            )
        shared = slot.entry.fqn in self.shared
        if shared and local.dtype.itemsize != slot.buffer.element_size():
            raise UnsupportedError(
                f"Parameter {slot.entry.fqn!r} became {local.dtype}: copy_engines=True shares its memory between GPUs, "
                f"which is of the size of {slot.buffer.dtype}. Set dtypes before ndcompile.compile."
            )
        if local.shape != slot.entry.storage_shape or self.pinned or shared:
            local = local.clone() if shared else local  # it may be in the buffer
            buffer = self._memory(slot.entry, local.dtype, zeros=True)
            view = self._without_padding(slot.entry, buffer)
            with torch.no_grad():
                view.copy_(local)
            slot.parameter._local_tensor = view  # type: ignore[attr-defined]
            slot.buffer, slot.local = buffer, view
        else:
            slot.buffer = slot.local = local

    def _refuse_replaced(self, kind: str, fqn: str, found: object) -> None:
        raise UnsupportedError(
            f"{kind} {fqn!r} was replaced after compile (found {type(found).__name__}). Change the model (adapters, "
            "resized embeddings, assigned state dicts) first, then call ndcompile.compile."
        )

    def local_tensor(self, fqn: str) -> Tensor:
        """This rank's shard of a parameter, without padding."""
        return next(slot.local for slot in self.slots if slot.entry.fqn == fqn)

    def local_tensors(self, arrived: Callable[[], None] | None = None) -> list[Tensor]:
        """The padded local buffers, attached to autograd: gradients arrive in the DTensor parameters.

        arrived: called in backward before they do.
        """
        if torch.is_grad_enabled() and any(slot.parameter.requires_grad for slot in self.slots):
            return list(_ToLocal.apply(self.slots, partial(self._arrived, arrived), *(s.parameter for s in self.slots)))
        return [slot.buffer.detach() for slot in self.slots]

    def _arrived(self, arrived: Callable[[], None] | None) -> None:
        if arrived is not None:
            arrived()
        if self.pinned:
            finish(self.mesh.device)


class _ToLocal(torch.autograd.Function):
    """One autograd node from all DTensor parameters to their local buffers."""

    @staticmethod
    def forward(ctx, slots: list[Slot], arrived: Callable[[], None], *parameters: nn.Parameter):
        ctx.slots, ctx.arrived = slots, arrived
        local = tuple(slot.buffer.detach() for slot in slots)
        ctx.mark_non_differentiable(
            *(t for t, slot in zip(local, slots, strict=True) if not slot.parameter.requires_grad)
        )
        ctx.set_materialize_grads(False)
        return local

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        ctx.arrived()
        return None, None, *(_to_dtensor(slot, grad) for slot, grad in zip(ctx.slots, grads, strict=True))


def _to_dtensor(slot: Slot, grad: Tensor | None) -> DTensor | None:
    if grad is None:
        return None
    if grad.shape != slot.local.shape:
        grad = narrow(grad, [0] * grad.ndim, slot.local.shape)
    return _like(slot.parameter, grad)


def _like(tensor: Tensor, local: Tensor) -> DTensor:
    """A DTensor with shape and placements of another one, `tensor`, around `local`.

    The constructor with a ready spec: from_local would move `local` to the mesh's device, and costs 15 times as much
    (61 against 4 microseconds).
    """
    return type(tensor)(local, tensor._spec, requires_grad=False)  # type: ignore
