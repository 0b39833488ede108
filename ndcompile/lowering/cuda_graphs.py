"""CUDA graphs: programs of inference whose shapes are fixed are recorded once and replayed, without launches by Python.

Inductor's cudagraph trees record and replay. They copy every input into memory of their own first, and refuse a graph
that writes to its inputs, except for inputs whose address stays. Dynamo says which those are by what it knows of
modules and of `mark_static_address`; here it is known from what an input stands for: parameters, buffers, the rank's
index, and the tensors of a static cache, which the graph writes. One of them at another address is recorded anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ndcompile.capture.capture import Captured
from ndcompile.capture.graph_input import BUFFER, CACHE, COORDINATE, PARAMETER, VARYING_CACHE
from ndcompile.private.inductor import compile_fx_inner, skipped_cuda_graphs

_logger = logging.getLogger("ndcompile.cuda_graphs")

SETTINGS = {"triton.cudagraphs": True}
"""Settings of torch._inductor.config for a program that is recorded."""

STAYS = frozenset({PARAMETER, BUFFER, COORDINATE, CACHE, VARYING_CACHE})
"""Kinds of inputs that are at the same address in every call."""

RUNS_TO_RECORD = 3
"""A program warms up, is recorded, and from the third run on replayed."""


class Recorded:
    """A program that inductor records. Its outputs are copies: the next replay writes to the graph's own memory."""

    def __init__(self, run: Callable[..., Sequence[Any]], what: str) -> None:
        self.run, self.what, self.runs = run, what, 0

    def __call__(self, *inputs: Any) -> list[Any]:
        torch.compiler.cudagraph_mark_step_begin()  # what the last run returned is not needed any more
        before = skipped_cuda_graphs()
        outputs = [output.clone() if isinstance(output, Tensor) else output for output in self.run(*inputs)]
        self.runs += 1
        if self.runs <= RUNS_TO_RECORD and skipped_cuda_graphs() > before:
            _logger.warning("%s: no CUDA graph, inductor's warning above says why", self.what)
        return outputs


def fixed_inputs(captured: Captured, device: torch.device, what: str) -> list[int] | None:
    """The inputs whose address stays, where the program is to be recorded. If it cannot be, the log says why."""
    for holds, reason in OBSTACLES:
        if found := holds(captured, device):
            _logger.warning("%s: no CUDA graph, as %s", what, reason.format(found))
            return None
    return [number for number, node in enumerate(captured.placeholders) if node.meta["input"].kind in STAYS]


def record(fixed: Sequence[int]) -> Callable[..., Any]:
    """The `inner_compile` of `compile_fx` for a program of which these inputs stay at their address."""

    def inner_compile(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        return compile_fx_inner(module, inputs, **(options | {"static_input_idxs": list(fixed)}))

    return inner_compile


def _other_device(captured: Captured, device: torch.device) -> str:
    return "" if device.type == "cuda" else device.type


def _trains(captured: Captured, device: torch.device) -> str:
    fakes = [node.meta["val"] for node in captured.placeholders]
    trains = torch.is_grad_enabled() and any(isinstance(fake, Tensor) and fake.requires_grad for fake in fakes)
    return "gradients" if trains else ""


def _grows(captured: Captured, device: torch.device) -> str:
    return "" if captured.cache is None else ", ".join(captured.cache.outputs()[:1])


def _symbolic(captured: Captured, device: torch.device) -> str:
    sizes = {name for name, symbol in captured.symbols.items() if not isinstance(symbol, int)}
    read = any(_has_symbols(node.meta["val"]) for node in captured.placeholders)
    return ", ".join(sorted(sizes)) if read else ""


def _reads(captured: Captured, device: torch.device) -> str:
    """The module that reads a number from a tensor, which waits for the device."""
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    read = (n for n in captured.module.graph.nodes if n.op != "placeholder" and isinstance(n.meta.get("val"), numbers))
    return next((repr((node.meta.get("custom") or {}).get("module", "")) for node in read), "")


def _has_symbols(value: Any) -> bool:
    sizes = value.shape if isinstance(value, Tensor) else [value]
    return any(isinstance(size, torch.SymInt) for size in sizes)


OBSTACLES: tuple[tuple[Callable[[Captured, torch.device], str], str], ...] = (
    (_other_device, "the model is on {}"),
    (_trains, "it computes {}: call the model under torch.no_grad()"),
    (_grows, "its key-value cache grows, from {} on: use a static cache (cache_implementation='static')"),
    (_symbolic, "its sizes are symbols ({}): call ndcompile.compile with dynamic=False, or give position_ids"),
    (_reads, "the host reads numbers in {}: choose an ep_implementation in fixed shapes (all_reduce, capacity)"),
)
"""What keeps a program from being recorded: returns what was found, or nothing; and how the log says it."""
