"""Real weights on a model: every rank keeps its slices of them, after the ranks compared what they hold.

Nothing is sent but one hash a tensor, through the store: ranks that drew different random weights, or read different
files, would otherwise train a model that is pieced together from several.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ndcompile.errors import AgreementError, UnsupportedError
from ndcompile.options import Options
from ndcompile.parameters.layout import boxes, narrow
from ndcompile.parameters.storage import ParameterStore
from ndcompile.plans.sharding_plan import ParameterPlan, ShardingPlan
from ndcompile.verify.agreement import Agreement, input_hashes

META, READ = "meta", "checkpoint"


def real_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by FQN if they have values; empty for a model on the meta device.

    Raises UnsupportedError for a mix of both, naming one of each.
    """
    parameters = dict(model.named_parameters())
    meta = [name for name, parameter in parameters.items() if parameter.is_meta]
    if meta and len(meta) < len(parameters):
        real = next(name for name, parameter in parameters.items() if not parameter.is_meta)
        raise UnsupportedError(
            f"Parameter {meta[0]!r} is on the meta device ({len(meta)} of {len(parameters)} are), but {real!r} has "
            "values. Load the whole model, or build it all on the meta device and pass checkpoint=."
        )
    return {} if meta else {name: parameter.detach() for name, parameter in parameters.items()}


def agree_before_binding(
    agreement: Agreement,
    model: nn.Module,
    plan: ShardingPlan,
    weights: Mapping[str, Tensor],
    from_checkpoint: bool,
    options: Options,
) -> None:
    """All ranks compile the same model, give its weights in the same way, and hold the same ones.

    Raises AgreementError on every rank, with the tensor and the ranks that differ.
    """
    settings = [f"cpu_offload {plan.cpu_offload}", f"copy_engines {options.copy_engines}"]
    settings.append(f"disable_passes {sorted(options.disabled)}")
    lines = [plan.model, *settings, *map(_describe, plan.parameters)]
    agreement.same("plan", lines, "the model or its sharding plan")
    sources = agreement.exchange("weights/source", READ if from_checkpoint else "real" if weights else META)
    if len(set(sources)) > 1:
        raise AgreementError(
            f"Ranks start from different weights: {_spell(sources)} (meta: none yet, real: those on the model, "
            "checkpoint: read from checkpoint=). Build the model and call ndcompile.compile alike on all ranks."
        )
    if not weights or from_checkpoint or agreement.alone:
        return
    tensors = {**weights, **dict(model.named_buffers())}
    sums = agreement.exchange("weights/checksums", input_hashes(tensors))
    differing = [name for name in tensors if len({held.get(name) for held in sums}) > 1]
    if differing:
        first = differing[0]
        raise AgreementError(
            f"Ranks hold different values of {first!r} (and {len(differing) - 1} more of {len(tensors)} tensors): "
            f"{_spell([held.get(first) for held in sums])}. Load the same files on every rank, call "
            "torch.manual_seed with one number before building the model, or build it on the meta device and pass "
            "checkpoint=."
        )


def slice_weights(store: ParameterStore, weights: dict[str, Tensor]) -> None:
    """Fill the store with this rank's parts of `weights`, which is emptied: each full tensor is let go when it is
    sliced, so that no more than one has a second copy."""
    for slot in store.slots:
        full = weights.pop(slot.entry.fqn)
        store.materialize_slot(slot)
        for box in boxes(slot.entry.shape, *store.layout(slot.entry)):
            narrow(slot.local, box.local_offset, box.size).copy_(narrow(full, box.global_offset, box.size))


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Buffers keep their values; they are whole on every rank."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def _describe(entry: ParameterPlan) -> str:
    return f"{entry.fqn} {tuple(entry.shape)} {entry.dtype}, tp {entry.tp}, fsdp {entry.fsdp} {entry.fsdp_style}"


def _spell(values: list) -> str:
    ranks = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[value].append(rank)
    return ", ".join(f"ranks {held}: {value}" for value, held in ranks.items())
