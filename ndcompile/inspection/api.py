"""`ndcompile.plan`: what a layout does to a model and what it costs, before anything runs."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import fx
from transformers import PretrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from ndcompile.byte_sizes import parse_bytes
from ndcompile.capture.shadow import copy_without_weights
from ndcompile.derive import with_derived_plan
from ndcompile.errors import MeshError
from ndcompile.inspection.kernels import filled_rows
from ndcompile.inspection.memory import memory, stored_bytes
from ndcompile.inspection.ranks import rank_strides
from ndcompile.inspection.rates import Rates, find_rates
from ndcompile.inspection.report import Report
from ndcompile.inspection.rows import boundary_rows, collective_rows, parameter_rows, pass_rows, saved_rows
from ndcompile.inspection.rules import rules_of
from ndcompile.inspection.scheduled import scheduled
from ndcompile.inspection.serial import read_report, write_report
from ndcompile.inspection.source import model_of
from ndcompile.inspection.time_model import ADAMW_PASSES, TimeEstimate, collective_times, estimate
from ndcompile.inspection.trace import Traced, trace
from ndcompile.mesh import check_expert_size, config_sizes
from ndcompile.operators.chunked_loss import vocabulary_loss
from ndcompile.plans.given_config import config_of
from ndcompile.plans.plan_table import exchange_lines
from ndcompile.refusals import check_model


@dataclass(frozen=True)
class Plan:
    """A sharding plan with what it costs. `report` holds all of it as data; a plan read from a file has no graphs."""

    report: Report
    traced: Traced | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        from ndcompile.inspection.show import text

        return text(self.report)

    def show(self, width: int | None = None, file: TextIO | None = None) -> None:
        """Print tables. width: columns; by default the terminal's, and 100 where the output is piped."""
        from ndcompile.inspection.show import show

        show(self.report, width, file or sys.stdout)

    def explain(self, name: str) -> str:
        """The story of a module, a parameter or a graph node: rule, layouts, and what each pass did to it.

        Raises ValueError for a name that the plan does not know, with those that are close.
        """
        from ndcompile.inspection.explain import explain

        return explain(self.report, name, self.traced)

    def of_rank(self, rank: int) -> str:
        """The index ranges of every parameter that one rank holds, a line for all layers that are alike.

        Ranks are numbered as `init_mesh` numbers them. Raises ValueError for a rank that the mesh does not have.
        """
        from ndcompile.inspection.ranks import rank_text

        return rank_text(self.report, rank)

    def diff(self, other: Plan) -> str:
        """What differs from `other`, as lines with - (this plan) and + (the other); "" for equal plans."""
        from ndcompile.inspection.diff import diff

        return diff(self.report, other.report)

    def diff_pass(self, name: str) -> str:
        """The graph around one pass: the nodes that it added (+), removed (-) or changed (~).

        Raises ValueError for a name that is no pass of this plan, with those that are.
        """
        from ndcompile.inspection.diff import diff_pass

        return diff_pass(self.report, name)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON, see docs/inspection.md. Raises OSError for a folder that does not exist."""
        check_output(path)
        write_report(self.report, Path(path))

    @staticmethod
    def from_json(path: str | os.PathLike[str]) -> Plan:
        """A plan from what `to_json` wrote. Raises OSError and NdcompileError as `read_report`."""
        return Plan(read_report(Path(path)))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one static HTML page. Raises OSError for a folder that does not exist."""
        from ndcompile.inspection.page import write_page

        check_output(path)
        write_page(self.report, Path(path))


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """A plan from a JSON file, see `Plan.from_json`."""
    return Plan.from_json(path)


def plan(
    model: PreTrainedModel | PretrainedConfig | str | os.PathLike[str],
    distributed_config: DistributedConfig | dict[str, Any] | None = None,
    *,
    batch_size: int = 1,
    seq_len: int = 4096,
    world_size: int | None = None,
    expert_capacity: float | None = None,
    optimizer_dtype: torch.dtype | None = None,
    gradient_checkpointing: bool = False,
    rates: str | Rates = "h100-infiniband",
    whole: bool = False,
    memory_budget: int | str | None = None,
    loss_only: bool = False,
) -> Plan:
    """Plan a training step of a model on a mesh: no GPU, no weights, no other ranks, no process group.

    model: a transformers model (left as it is), its config, a config.json, a folder with one, or a Hub id in the local
        cache. Without a model of its own the plan is for the dtype of the config, bfloat16 by default.
    distributed_config: sizes (`fsdp_size`, `tp_size`, `ep_size`, `dp_replicate_size`) and overrides, as in
        `ndcompile.compile`, `tp_plan="derive"` too. Defaults to the config's own, or one rank.
    batch_size, seq_len: of one data rank: sequences and tokens of each.
    world_size: checked against the product of the sizes.
    expert_capacity: see `ndcompile.compile`.
    optimizer_dtype: of AdamW's moments; None for the parameters' dtype.
    gradient_checkpointing: recompute the activations of every layer; otherwise what the model is set to.
    rates: a preset, the path of a .json or .toml file (`ndcompile.inspection.rates`), or Rates.
    whole: trace every layer, instead of those that differ. The figures are the same.
    memory_budget: see `ndcompile.compile`; every layer is traced then.
    loss_only: see `ndcompile.compile`.

    Raises MeshError, PlanError, CaptureError, UnsupportedError and ValueError as `ndcompile.compile` and the first call
    would, and for input that cannot be read.
    """
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number, 1 or more.")
    rates = rates if isinstance(rates, Rates) else find_rates(rates)
    built = model_of(model)
    check_model(built)
    config = _config(built, distributed_config)
    sizes = _sizes(config, world_size)
    config = with_derived_plan(built, config, sizes["tp"])
    built = copy_without_weights(built)
    if gradient_checkpointing:
        built.activation_checkpointing_enable()
    traced = trace(
        built,
        sizes,
        config,
        batch_size=batch_size,
        seq_len=seq_len,
        expert_capacity=expert_capacity,
        whole=whole,
        memory_budget=None if memory_budget is None else parse_bytes(memory_budget),
        loss_only=loss_only,
    )
    report = _report(built, config, traced, rates, optimizer_dtype)
    return Plan(dataclasses.replace(report, batch_size=batch_size, seq_len=seq_len), traced)


def check_output(path: str | os.PathLike[str]) -> None:
    """Raises FileNotFoundError for a file in a folder that does not exist, IsADirectoryError for a folder."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: the folder {path.parent} does not exist. Create it, or write elsewhere.")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Give the name of a file in it.")


def _config(model: PreTrainedModel, given: DistributedConfig | dict[str, Any] | None) -> DistributedConfig:
    config = given if given is not None else getattr(model.config, "distributed_config", None)
    if config is None:
        return DistributedConfig()
    return config_of(config)


def _sizes(config: DistributedConfig, world_size: int | None) -> dict[str, int]:
    sizes = config_sizes(config)
    check_expert_size(sizes, sizes["ep"])
    names = ("dp_replicate", "fsdp", "tp")
    ranks = math.prod(sizes[name] for name in names)
    if world_size is not None and ranks != world_size:
        others = {name: ranks // sizes[name] for name in names}
        fitting = [f"{n}={world_size // other}" for n, other in others.items() if world_size % other == 0]
        raise MeshError(
            f"{' x '.join(f'{name}={sizes[name]}' for name in names)} is {ranks} ranks, not {world_size}. "
            + (f"Legal with the other sizes kept: {' or '.join(fitting)}." if fitting else "Change two of the sizes.")
        )
    return sizes


def _report(
    model: PreTrainedModel,
    config: DistributedConfig,
    traced: Traced,
    rates: Rates,
    optimizer_dtype: torch.dtype | None,
) -> Report:
    time, storage = _time(model, traced, rates), _storage(traced)
    return Report(
        model=traced.plan.model,
        mesh=dict(traced.plan.sizes),
        storage=storage,
        batch_size=0,
        seq_len=0,
        parameters=parameter_rows(traced, rules_of(model, config, traced.plan.repairs)),
        boundaries=boundary_rows(traced),
        collectives=collective_rows(traced, _collective_seconds(traced, rates)),
        passes=pass_rows(traced),
        memory=memory(traced, optimizer_dtype).figures(optimizer_dtype),
        compute=time.compute,
        time=time.time,
        critical_path=time.critical_path,
        rates=rates.as_row(),
        experts=tuple(exchange_lines(traced.plan)),
        notes=_notes(traced),
        layer_list=traced.stack.path,
        layers={str(index): traced_one for index, traced_one in traced.stack.represents.items()},
        saved=saved_rows(traced),
        rank_strides={axis: stride for axis, stride in rank_strides(traced.plan.sizes).items() if axis in storage},
    )


def _time(model: PreTrainedModel, traced: Traced, rates: Rates) -> TimeEstimate:
    top_k = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1
    trained = [p for p in traced.plan.parameters if p.fqn not in traced.frozen]
    return estimate(
        *scheduled(traced),
        traced.mesh.axes,
        rates,
        optimizer_bytes=0 if traced.plan.cpu_offload else ADAMW_PASSES * sum(map(stored_bytes, trained)),
        size=traced.size,
        filled=filled_rows(traced.plan.experts, top_k),
    )


def _collective_seconds(traced: Traced, rates: Rates) -> dict[fx.Node, float]:
    """Seconds of the collectives of the lowered graphs, each with all layers that it stands for."""
    found: dict[fx.Node, float] = {}
    for module in (traced.forward, traced.backward):
        found |= collective_times(module.graph, traced.mesh.axes, rates, traced.size)
    return {node: seconds * traced.times(node) for node, seconds in found.items()}


def _storage(traced: Traced) -> Mapping[str, int]:
    mesh = traced.mesh.device_mesh
    return {name: size for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True) if size > 1}


def _notes(traced: Traced) -> tuple[str, ...]:
    notes = [f"Repaired: {repair}." for repair in traced.plan.repairs]
    if traced.plan.cpu_offload:
        notes.append(
            "fsdp_cpu_offload: parameters, gradients and moments are in host memory. The times of copies and of an "
            "optimizer that runs there are not estimated."
        )
    if traced.loss_only:
        chunked = traced.captured.module.graph.find_nodes(op="call_function", target=vocabulary_loss)
        notes.append(
            "loss_only: no logits are returned, "
            + (
                "and they exist for a chunk of tokens at a time."
                if chunked
                else "but no loss was found to do without them as a whole."
            )
        )
    notes += [f"Not counted in the figures: {line}" for line in traced.opaque]
    if traced.rows:
        notes.append("Numbers of rows that depend on routing are those of even routing: every expert equally often.")
    alike = len(traced.stack.represents) - len(traced.stack.counts)
    if alike:
        notes.append(
            f"{len(traced.stack.counts)} of {len(traced.stack.represents)} layers were traced; {alike} are like one of "
            "them, and counted with it."
        )
    if traced.proof is not None:
        notes.append(f"Along tp {traced.proof.summary(traced.stack.count)}.")
    return tuple(notes)
