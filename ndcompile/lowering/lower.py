"""Lower a graph with distributed nodes: AOTAutograd, partition into forward and backward, inductor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from ndcompile.capture.capture import Captured
from ndcompile.lowering import cuda_graphs
from ndcompile.lowering.partition import Partitioner, partition_tags
from ndcompile.lowering.schedule import SCHEDULING, WITH_GROUPS, Schedule, inductor_settings
from ndcompile.private.inductor import (
    aot_autograd,
    backward_compiled_with_forward,
    compile_fx,
    decompositions,
    launch_empty_grids,
    order_collectives_of_subgraphs,
    own_decompositions,
    size_kernels_by_hints,
)
from ndcompile.private.tracing import TracingContext, tracing

BACKENDS = ("inductor", "aot_eager", "eager")

KERNELS_ALIKE = {"deterministic": True}
"""Inductor chooses the order of sums by formula, not by timing candidates: two ranks that time them choose differently,
and what both compute, such as the gradient of a norm on all tp ranks or a router's choice of experts, drifts apart."""

SUMS_IN_ONE_KERNEL = {"unroll_reductions_threshold": 17}
"""Sums of up to 16 numbers are written out, in the kernel of what is summed. Inductor does so below 8, and adds the 8
results of a token's experts in blocks of 8 columns, which reads memory at a quarter of its rate."""

LEFT_OUT_ON_CPU = ("coalesce_collectives", "delay_weight_gradients", "overlap_communication")
"""Several collectives at once on a gloo group corrupt the heap, in torch itself: see bench/gloo_heap.py."""

Compiled = Callable[..., Sequence[Tensor]]

_AUTOCAST = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
"""Devices whose autocast a capture may run under."""


def lower(
    captured: Captured,
    backend: str,
    alike: bool,
    disabled: Collection[str] = (),
    fixed_inputs: Sequence[int] | None = None,
    beside_products: str | None = None,
    groups: Mapping[str, str] = MappingProxyType({}),
    copies: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Compiled, Partitioner]:
    """Compile the graph; the result takes the graph's inputs in order and is differentiable.

    alike: some ranks compute the same values, which must be the same bits (see `KERNELS_ALIKE`).
    disabled: passes of `partition.ON_JOINT_GRAPH` and `schedule.SCHEDULING` to leave out.
    fixed_inputs: for a program that inductor records as a CUDA graph, see `cuda_graphs`.
    beside_products: the process group whose collectives `pipeline_matmuls` rewrites.
    groups: process groups -> names of axes, for the graphs that are published.
    copies: process groups -> those of the same ranks that `use_copy_engines` puts in their place.

    `aot_eager` runs the same partitioned graphs without inductor, `eager` the captured graph as it is. Lowering needs
    the autocast state of the capture: it is here that casts become nodes. The compiled graphs, backward included, then
    run without autocast.
    """
    module = captured.module
    module.recompile()
    if backend == "eager":
        return _as_captured(module), Partitioner()
    partitioner = Partitioner(partition_tags(module.graph), disabled, groups)
    fakes = [node.meta["val"] for node in captured.placeholders]
    with ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(captured.fake_mode)))
        if backend == "inductor":
            launch_empty_grids()
            size_kernels_by_hints()
            order_collectives_of_subgraphs()
            stack.enter_context(torch._inductor.config.patch(custom_partitioner_fn=partitioner))
            stack.enter_context(backward_compiled_with_forward())
            if fixed_inputs is not None:
                disabled = {*disabled, "reuse_layers"}
            disabled = {*disabled, *left_out(fakes)}
            settings = SUMS_IN_ONE_KERNEL | inductor_settings(disabled, beside_products, groups, copies)
            settings |= KERNELS_ALIKE if alike else {}
            options: dict[str, Any] = {}
            if fixed_inputs is not None:
                settings, options = settings | cuda_graphs.SETTINGS, {"inner_compile": cuda_graphs.record(fixed_inputs)}
            stack.enter_context(own_decompositions())
            compiled: Any = compile_fx(module, fakes, config_patches=settings, **options)
            return compiled, partitioner
        pipeline = Schedule([*disabled, *(set(SCHEDULING) - WITH_GROUPS)], beside_products, groups, copies)

        def run_graph(gm: fx.GraphModule, inputs: Sequence[object], backward: bool = False) -> Callable[..., Any]:
            pipeline(gm.graph)
            gm.recompile()
            return partitioner.record_and_run(gm, backward)

        compiler = aot_autograd(
            fw_compiler=run_graph,
            inference_compiler=run_graph,
            bw_compiler=partial(run_graph, backward=True),
            partition_fn=partitioner,
            decompositions=decompositions(),
        )
        return compiler(module, fakes), partitioner


def left_out(inputs: Sequence[object]) -> Sequence[str]:
    """Passes that do not run on a graph of these inputs, because of the device they are on."""
    devices = {each.device.type for each in inputs if isinstance(each, Tensor)}
    return LEFT_OUT_ON_CPU if devices == {"cpu"} else ()


def _as_captured(module: fx.GraphModule) -> Compiled:
    """The graph under the autocast state of now: without AOTAutograd casts are no nodes.

    Autograd hands one tensor to all operands of a sum: a copy keeps gradients in memory of their own (`own_memory.py`).
    """
    states = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _AUTOCAST]

    def run(*inputs: Tensor) -> Sequence[Tensor]:
        for each in inputs:
            if isinstance(each, Tensor) and each.grad_fn is not None:
                each.register_hook(_copy)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))  # the graph may switch it
            for device, enabled, dtype in states:
                stack.enter_context(torch.autocast(device, dtype, enabled))
            return module(*inputs)

    return run


def _copy(gradient: Tensor | None) -> Tensor | None:
    """A copy. Autograd calls hooks with None too, for an input that no output's gradient reaches."""
    return None if gradient is None else gradient.clone()


def no_autocast() -> ExitStack:
    """Context with autocast off on every device that has it on."""
    stack = ExitStack()
    for device in _AUTOCAST:
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def no_inference_mode() -> ExitStack:
    """Context for tracing: fake tensors made in inference mode could not take part in it."""
    stack = ExitStack()
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
    return stack


def readable(module: fx.GraphModule) -> str:
    """The graph as text, for dumps."""
    return module.print_readable(print_output=False)
