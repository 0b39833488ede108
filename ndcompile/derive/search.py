"""The search for a tp_plan: propose, capture, prove, keep what is proven."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import Replicate
from transformers import PretrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from ndcompile.capture.call import bind
from ndcompile.capture.capture import capture
from ndcompile.capture.shadow import Shadow, copy_without_weights
from ndcompile.derive.dataflow import find_pairs, watched_integers
from ndcompile.derive.proposals import Modules, Rules, pair_proposals, vocabulary_proposals
from ndcompile.errors import CaptureError, NdcompileError, PlanError, UnsupportedError, VerifyError
from ndcompile.graphs.pass_context import PassContext
from ndcompile.inspection.layers import keep_traced, stack_of
from ndcompile.inspection.mesh_without_ranks import mesh_of_sizes
from ndcompile.inspection.source import model_of
from ndcompile.pipeline import run_passes
from ndcompile.plans.sharding_plan import ShardingPlan, build_plan
from ndcompile.private.tracing import fake_tensor
from ndcompile.verify.sharded_dims import unsharded

_logger = logging.getLogger("ndcompile.derive")

DERIVE = "derive"
"""`DistributedConfig(tp_plan="derive")`."""


PROGRESS = (PlanError, UnsupportedError, CaptureError, VerifyError)
"""What stops a proposal, in the order of the steps: the later, the closer it came."""


@dataclass(frozen=True)
class Derivation:
    """rules: the tp_plan, every rule of it proven; what the model's own plan has is not repeated.

    sharded: share of the parameters' elements that tp cuts. refused: what was proposed, by the module that would sum or
    "vocabulary" -> why the proposal that came furthest was refused. proven: what the proof says of the whole plan.
    """

    rules: Mapping[str, str]
    sharded: float
    refused: Mapping[str, str]
    proven: str

    def __str__(self) -> str:
        return json.dumps(dict(self.rules), indent=2)


def derive_tp_plan(
    model: PreTrainedModel | PretrainedConfig | str | os.PathLike[str],
    tp_size: int,
    *,
    batch_size: int = 2,
    seq_len: int = 16,
) -> dict[str, str]:
    """A tp_plan for a model that has none: rules of colwise and rowwise pairs, each proven on the graph of the model.

    It is an ordinary plan: print it, keep it, change it, and pass it as `DistributedConfig(tp_plan=...)`. Of a model
    with a plan it is what can be added to that. `DistributedConfig(tp_plan="derive")` derives and compiles in one go.

    model: a transformers model (left as it is), its config, or the path of one. It is captured as it stands, in
        training or evaluation mode, without weights. batch_size, seq_len: of the call that is captured.

    Raises PlanError where nothing can be proposed or proven, with the reasons; CaptureError for a model that is no one
    graph; ValueError for one rank.
    """
    found = derive(model_of(model), tp_size, batch_size=batch_size, seq_len=seq_len)
    return dict(found.rules)


def derive(model: PreTrainedModel, tp_size: int, *, batch_size: int = 2, seq_len: int = 16) -> Derivation:
    """See `derive_tp_plan`; also what was refused."""
    if tp_size < 2:
        raise ValueError(f"tp_size={tp_size!r}: a plan is for 2 ranks or more.")
    if not isinstance(model, PreTrainedModel):
        raise PlanError(
            f"tp_plan={DERIVE!r}: {type(model).__name__} is no transformers model, and how to call it is unknown. "
            "Pass a plan: DistributedConfig(tp_plan={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'})."
        )
    search = _Search(model, tp_size, batch_size, seq_len)
    search.run()
    if not search.rules and not model.tp_plan:
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in search.refused.items())
        raise PlanError(
            f"No tp_plan can be derived for {type(model).__name__} on tp={tp_size}. "
            + (f"Proposed and refused:\n{reasons}" if reasons else "No linears of it make a pair.")
            + "\nPass a plan of your own, or use fsdp only."
        )
    return search.result()


def with_derived_plan(model: nn.Module, config: DistributedConfig, tp_size: int) -> DistributedConfig:
    """`config` with a derived plan where it asks for one; rank 0 prints the plan, so that it can be kept.

    Raises PlanError, see `derive_tp_plan`.
    """
    if config.tp_plan != DERIVE:
        return config
    if tp_size == 1:
        return dataclasses.replace(config, tp_plan=None)
    found = derive(model, tp_size)
    if not dist.is_initialized() or dist.get_rank() == 0:
        title = f"tp_plan of {type(model).__name__} for tp={tp_size}, {found.sharded:.0%} of the parameters sharded"
        whole = "".join(f"\nleft whole: {name}: {reason}" for name, reason in found.refused.items())
        print(f"{title}:\n{found}{whole}", file=sys.stderr)
    return dataclasses.replace(config, tp_plan=dict(found.rules) or None)  # an empty plan would be no rule at all


@contextmanager
def without_traces_of_refusals() -> Iterator[None]:
    """torch logs a traceback for every shape that does not fit; here that is an answer. What a capture warns of, the
    one of the first call will."""
    logs = [logging.getLogger(name) for name in (fake_tensor.__name__, "ndcompile.opaque")]
    before = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in zip(logs, before, strict=True):
            log.setLevel(level)


class _Search:
    """rules: what is accepted so far."""

    def __init__(self, model: PreTrainedModel, tp_size: int, batch_size: int, seq_len: int) -> None:
        self.whole, self.tp = copy_without_weights(model), tp_size
        for parameter in self.whole.parameters():
            parameter.requires_grad_(parameter.is_floating_point())  # frozen ones too: gradients show what flows
        ids = torch.empty(batch_size, seq_len, dtype=torch.int64, device="meta")
        signature = inspect.signature(type(model).forward.__get__(model))
        labels = {"labels": ids.clone()} if "labels" in signature.parameters else {}
        self.call = bind(signature, (), {"input_ids": ids, **labels})
        self.rules: Rules = {}
        self.refused: dict[str, str] = {}
        self.proven = ""

    def run(self) -> None:
        """Try every pair, that with the most parameters first, and the vocabulary."""
        with torch.inference_mode(False), torch.enable_grad(), without_traces_of_refusals():
            graph, read = self._prepare()
            modules = Modules(self.model)
            pairs = find_pairs(graph, self.model)
            pairs.sort(key=lambda pair: -modules.elements([*pair.columns, pair.row]))
            proposals = {pair.row: list(pair_proposals(pair, modules, read, self.tp)) for pair in pairs}
            proposals["vocabulary"] = list(vocabulary_proposals(self.model))
            if not self._accept("all", [self._first_of_each(proposals)]):
                self.refused.pop("all", None)
                for name, listed in proposals.items():
                    self._accept(name, listed)

    def _first_of_each(self, proposals: Mapping[str, Sequence[Rules]]) -> Rules:
        """The likeliest rules of all that do not contradict each other: for most models they are right at once."""
        rules: Rules = {}
        for listed in proposals.values():
            if listed and self.taken.isdisjoint(listed[0]) and rules.keys().isdisjoint(listed[0]):
                rules |= listed[0]
        return rules

    @property
    def taken(self) -> set[str]:
        """Modules that a rule names."""
        return {*self.rules, *(self.whole.tp_plan or {})}

    def result(self) -> Derivation:
        plan = self._plan(self.whole, self.rules, self.tp)
        total = sum(math.prod(p.shape) for p in plan.parameters)
        cut = sum(math.prod(p.shape) for p in plan.parameters if not isinstance(p.tp, Replicate))
        return Derivation(self.rules, cut / total, self.refused, self.proven)

    def _prepare(self) -> tuple[fx.Graph, set[str]]:
        """Capture the model without tp: its graph, and the integers that its code reads. Layers that repeat are left
        out, unless the model needs them."""
        part = copy_without_weights(self.whole)
        keep_traced(part, stack_of(part, self._plan(part, {}, 1)))
        try:
            self.model = part
            return self._capture_whole()
        except CaptureError:
            self.model = self.whole
            return self._capture_whole()

    def _capture_whole(self) -> tuple[fx.Graph, set[str]]:
        plan = self._plan(self.model, {}, 1)
        shadow = Shadow(self.model, plan, mesh_of_sizes(plan.sizes))
        with watched_integers(shadow.module) as read:
            return capture(shadow, self.model, self.call, dynamic=False).module.graph, read

    def _accept(self, name: str, proposals: Sequence[Rules]) -> bool:
        """Add the first proposal that is proven beside what is accepted already; whether there is one."""
        reasons: list[NdcompileError] = []
        for rules in proposals:
            if not self.taken.isdisjoint(rules):
                continue
            try:
                self.proven = self._prove(self.rules | rules)
            except PROGRESS as error:
                _logger.debug("%s is refused: %s", rules, error)
                reasons.append(error)
                continue
            self.rules |= rules
            return True
        if reasons:  # of the proposal that came furthest
            self.refused[name] = str(max(reasons, key=lambda e: PROGRESS.index(type(e)))).splitlines()[0]
        return False

    def _prove(self, rules: Rules) -> str:
        """What is proven of the model under `rules`. Raises what compiling and the first call would."""
        plan = self._plan(self.model, rules, self.tp)
        mesh = mesh_of_sizes(plan.sizes)
        shadow = Shadow(self.model, plan, mesh)
        captured = capture(shadow, self.model, self.call, dynamic=False)
        dtypes = {entry.fqn: entry.dtype for entry in plan.parameters}

        @cache
        def without_tp() -> fx.Graph:
            whole = Shadow(self.model, *unsharded(plan, mesh), shadow.opaque)
            return capture(whole, self.model, self.call, False).module.graph

        context = PassContext(plan, mesh, dtypes, captured.fake_mode, (), without_tp)
        proof = run_passes(captured, context)
        if proof is None:
            raise PlanError(f"{type(self.model).__name__} cannot be proven over tp: see docs/proof.md, Limits.")
        return proof.summary()

    def _plan(self, model: Any, rules: Rules, tp: int) -> ShardingPlan:
        sizes = {"dp_replicate": 1, "fsdp": 1, "tp": tp, "ep": 1}
        config = DistributedConfig(tp_plan=rules or None)
        return build_plan(copy_without_weights(model), sizes, config)
