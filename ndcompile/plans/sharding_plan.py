"""The sharding plan: frozen data that says where every parameter lives and which modules are boundaries.

It is a pure function of the model's shapes, the axis sizes and transformers' plans; no process group, no weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from ndcompile.errors import PlanError
from ndcompile.plans.expert_plan import ExpertPlan, plan_experts
from ndcompile.plans.own_rules import local_counts
from ndcompile.plans.styles import STYLES
from ndcompile.plans.tp_limits import check_tp
from ndcompile.plans.transformers_plan import resolve_plans
from ndcompile.plans.user_plan import resolve_user_plan
from ndcompile.private.distributed import StridedShard

KEEP, FREE = "keep_full_weight", "free_full_weight"


@dataclass(frozen=True)
class ParameterPlan:
    """One stored tensor. Tied parameters are one ParameterPlan with `aliases`.

    shape: global. tp, fsdp: placement on these axes; dp_replicate always replicates. Of an expert's weight (`expert`)
    they are the placements on ep and efsdp.
    tp_size: size of tp (ep). fsdp_sizes: of fsdp (efsdp); two sizes where it is ep_rest x efsdp.
    style: the TP or EP style that placed it.
    fsdp_style: whether backward gathers the weight again (`free_full_weight`) or keeps it.
    """

    fqn: str
    aliases: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    tp: Placement
    fsdp: Placement
    tp_size: int
    fsdp_sizes: tuple[int, ...]
    style: str
    fsdp_style: str
    expert: bool = False

    @cached_property
    def compute_shape(self) -> torch.Size:
        """Shape inside the graph: the rank's tp shard, whole over fsdp; uneven shards padded to the largest."""
        return _cut(self.shape, self.tp, self.tp_size)

    @cached_property
    def storage_shape(self) -> torch.Size:
        """Shape of the rank's buffer: `compute_shape` cut by fsdp, padded to the largest shard."""
        shape = self.compute_shape
        for size in self.fsdp_sizes:
            shape = _cut(shape, self.fsdp, size)
        return shape

    def placements(self, axes: tuple[str, ...]) -> tuple[Placement, ...]:
        """Placements in the order of a storage mesh's axes."""
        by_axis = {"dp_replicate": Replicate(), "tp": self.tp, "fsdp": self.fsdp, "efsdp": self.fsdp}
        by_axis["ep_rest"] = self.tp if self.expert else self.fsdp
        return tuple(by_axis[axis] for axis in axes)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes whose ranks hold parts or copies of this tensor and have different batches."""
        return ("dp_replicate", "efsdp") if self.expert else ("dp_replicate", "fsdp")


@dataclass(frozen=True)
class ModulePlan:
    """A module whose forward is a tp boundary, with its style."""

    fqn: str
    style: str


@dataclass(frozen=True)
class Repair:
    """A rule of the model's tp_plan whose style was replaced by one that is right, see `packed_repair`."""

    rule: str
    given: str
    style: str
    why: str

    def __str__(self) -> str:
        return f"tp_plan[{self.rule!r}] is {self.style!r}, not {self.given!r}: {self.why}"


@dataclass(frozen=True)
class ShardingPlan:
    """Axis sizes, parameters in the model's order, boundary modules, exchanges of tokens. Prints as a table.

    local_counts: FQNs of the integer attributes of which a rank's code sees its share, see `own_rules`.
    repairs: of the model's own tp_plan.
    cpu_offload: parameters, gradients and thus optimizer state live in host memory.
    """

    model: str
    sizes: Mapping[str, int]
    parameters: tuple[ParameterPlan, ...]
    modules: tuple[ModulePlan, ...]
    mixed_precision: bool = False
    experts: tuple[ExpertPlan, ...] = ()
    sequence_parallel: bool = False
    local_counts: tuple[str, ...] = ()
    repairs: tuple[Repair, ...] = ()
    cpu_offload: bool = False

    @cached_property
    def by_name(self) -> dict[str, ParameterPlan]:
        """Every FQN, aliases included, to its parameter."""
        return {name: p for p in self.parameters for name in (p.fqn, *p.aliases)}

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which the graph sees a parameter stored in `dtype`."""
        return torch.bfloat16 if self.mixed_precision and dtype.is_floating_point else dtype

    def __str__(self) -> str:
        from ndcompile.plans.plan_table import plan_table

        return plan_table(self)


def build_plan(
    model: nn.Module,
    sizes: Mapping[str, int],
    config: DistributedConfig,
    *,
    expert_capacity: float | None = None,
) -> ShardingPlan:
    """Resolve transformers' TP, EP and FSDP plans for `model` on axes of `sizes` (see `mesh.mesh_sizes`).

    Of an ordinary nn.Module the config's rules are the plan, see `user_plan`.

    Pass a copy of the model: transformers merges overrides into its `_tp_plan` and `_fsdp_plan`.
    expert_capacity: see `expert_plan.plan_experts`.

    Raises PlanError for a missing plan, unknown styles or keys, tied parameters with two placements, and sizes that tp
    or ep cannot divide.
    """
    sizes = {"ep": 1, **sizes}
    resolve = resolve_plans if isinstance(model, PreTrainedModel) else resolve_user_plan
    tp_styles, ep_styles, fsdp_styles = resolve(model, sizes, config)
    experts = plan_experts(model, ep_styles, sizes, config.ep_implementation, expert_capacity)
    names = _parameter_names(model)
    first = {fqns[0]: parameter for parameter, fqns in names.values() if ep_styles.get(fqns[0]) != "grouped_gemm"}
    check_tp(model, first, tp_styles, sizes["tp"])
    parameters = tuple(
        _plan_expert(parameter, fqns, fsdp_styles, sizes)
        if ep_styles.get(fqns[0]) == "grouped_gemm"
        else _plan_parameter(parameter, fqns, tp_styles, fsdp_styles, sizes)
        for parameter, fqns in names.values()
    )
    modules = tuple(
        ModulePlan(fqn, tp_styles[fqn]) for fqn, _ in model.named_modules() if fqn in tp_styles and sizes["tp"] > 1
    )
    counts = local_counts(model, config.tp_plan, sizes["tp"])
    mixed = bool(config.fsdp_mixed_precision) and sizes["fsdp"] * sizes["dp_replicate"] > 1
    by_sequence = bool(config.enable_sequence_parallel) and sizes["tp"] > 1
    return ShardingPlan(
        type(model).__name__,
        dict(sizes),
        parameters,
        modules,
        mixed,
        experts,
        by_sequence,
        counts,
        cpu_offload=bool(config.fsdp_cpu_offload),
    )


def _parameter_names(model: nn.Module) -> dict[int, tuple[nn.Parameter, list[str]]]:
    """Every parameter once, with all its names in the model's order."""
    names: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), (parameter, []))[1].append(fqn)
    return names


def _plan_parameter(
    parameter: nn.Parameter,
    fqns: list[str],
    tp_styles: Mapping[str, str],
    fsdp_styles: Mapping[str, str],
    sizes: Mapping[str, int],
) -> ParameterPlan:
    tp = sizes["tp"]
    styles = {fqn: tp_styles.get(fqn, "replicate") for fqn in fqns}
    places = {
        fqn: STYLES[style].place(fqn.rpartition(".")[2], parameter.ndim) if tp > 1 else Replicate()
        for fqn, style in styles.items()
    }
    fqn, placement = fqns[0], places[fqns[0]]
    for other in fqns[1:]:
        if places[other] != placement:
            raise PlanError(
                f"{fqn!r} and {other!r} are one tied tensor, but their styles {styles[fqn]!r} and {styles[other]!r} "
                f"place it as {placement} and {places[other]} on tp. Give both the same placement in tp_plan."
            )
    fsdp_style = next((s for name in fqns if (s := _fsdp_style(name, fsdp_styles)) is not None), KEEP)
    fsdp = _fsdp_placement(parameter.shape, placement, tp) if sizes["fsdp"] > 1 else Replicate()
    return ParameterPlan(
        fqn=fqn,
        aliases=tuple(fqns[1:]),
        shape=parameter.shape,
        dtype=parameter.dtype,
        tp=placement,
        fsdp=fsdp,
        tp_size=tp,
        fsdp_sizes=_fsdp_sizes(sizes),
        style=styles[fqn],
        fsdp_style=fsdp_style,
    )


def _plan_expert(
    parameter: nn.Parameter, fqns: list[str], fsdp_styles: Mapping[str, str], sizes: Mapping[str, int]
) -> ParameterPlan:
    """Whole experts over ep; over efsdp the first dim that divides evenly, so that no rank's shard is empty."""
    fqn, ep = fqns[0], sizes["ep"]
    efsdp = sizes["fsdp"] * sizes["tp"] // ep
    local = _cut(parameter.shape, Shard(0), ep)
    dim = next((dim for dim, size in enumerate(local) if size % efsdp == 0), 0)
    return ParameterPlan(
        fqn=fqn,
        aliases=tuple(fqns[1:]),
        shape=parameter.shape,
        dtype=parameter.dtype,
        tp=Shard(0),
        fsdp=Shard(dim) if efsdp > 1 else Replicate(),
        tp_size=ep,
        fsdp_sizes=(efsdp,),
        style="grouped_gemm",
        fsdp_style=_fsdp_style(fqn, fsdp_styles) or KEEP,
        expert=True,
    )


def _fsdp_sizes(sizes: Mapping[str, int]) -> tuple[int, ...]:
    """fsdp as the axes of the storage mesh that make it up."""
    rest = max(sizes["ep"] // sizes["tp"], 1)
    return tuple(size for size in (rest, sizes["fsdp"] // rest) if size > 1) or (1,)


def _fsdp_placement(shape: torch.Size, tp_placement: Placement, tp: int) -> Placement:
    """Shard the first dim that tp leaves alone or divides evenly, so that padding is the same on all tp ranks."""
    for dim in range(len(shape)):
        same_dim = isinstance(tp_placement, Shard | StridedShard) and tp_placement.dim == dim
        if not same_dim or (isinstance(tp_placement, Shard) and shape[dim] % tp == 0):
            return Shard(dim)
    return Replicate()


def _fsdp_style(fqn: str, fsdp_styles: Mapping[str, str]) -> str | None:
    """The style of the innermost module of the FSDP plan that contains `fqn`."""
    parts = fqn.split(".")
    for end in range(len(parts), -1, -1):
        if (style := fsdp_styles.get(".".join(parts[:end]))) is not None:
            return style
    return None


def _cut(shape: torch.Size, placement: Placement, size: int) -> torch.Size:
    if not isinstance(placement, Shard | StridedShard):
        return shape
    cut = list(shape)
    cut[placement.dim] = -(-cut[placement.dim] // size)
    return torch.Size(cut)


def generic(fqn: str) -> str:
    """The pattern of a plan that an FQN has in every layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", fqn)
