"""Runtime: the object that stands in a compiled model's `forward`.

At each call it binds the arguments, looks up the graph of this signature (or captures, lowers and agrees on a new one),
feeds it the parameters' local buffers, and puts the outputs back into the model's output class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, replace
from functools import cache, partial
from time import perf_counter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ndcompile.capture.asserted_branches import failed_check
from ndcompile.capture.call import Call, bind
from ndcompile.capture.capture import Captured, capture
from ndcompile.capture.loss_only import drop_logits, explain_logits
from ndcompile.capture.shadow import Shadow
from ndcompile.capture.signature import checkpointed_layers, describe, layers_of, model_state
from ndcompile.copy_engines.connect import Connection
from ndcompile.errors import CaptureError
from ndcompile.graphs.pass_context import PassContext
from ndcompile.graphs.recompute_choice import Choice, Stages, common
from ndcompile.lowering.async_tp import check_has_products, connect
from ndcompile.lowering.cuda_graphs import Recorded, fixed_inputs
from ndcompile.lowering.lower import lower, no_autocast, no_inference_mode
from ndcompile.lowering.partition import Partitioner
from ndcompile.mesh import StorageMesh
from ndcompile.operators.host_copies import finish
from ndcompile.options import Options
from ndcompile.parameters.storage import ParameterStore
from ndcompile.pipeline import run_passes
from ndcompile.plans.sharding_plan import ShardingPlan
from ndcompile.private.python import making_graphs
from ndcompile.progress import stages
from ndcompile.refusals import refuse_inner_calls, refuse_methods
from ndcompile.runtime.accumulation import Accumulation
from ndcompile.runtime.caches import CacheState, read_cache
from ndcompile.runtime.graph_arguments import GraphArguments, Seeds
from ndcompile.runtime.program import Program, Signature
from ndcompile.runtime.replay import Replay
from ndcompile.runtime.static_caches import CacheMemory, KeptCache, cache_shards, refuse_gradients
from ndcompile.verify.agreement import Agreement
from ndcompile.verify.collective_lines import collective_lines
from ndcompile.verify.sharded_dims import unsharded


class CompiledModel:
    """Callable that replaces `model.forward`. Holds the plan, the stored parameters, and one Program a signature."""

    def __init__(self, model: PreTrainedModel, mesh: StorageMesh, plan: ShardingPlan, options: Options) -> None:
        self.model, self.mesh, self.options = model, mesh, options
        self.kept_cache = KeptCache()
        self.plan = plan
        self.offloads = plan.cpu_offload and mesh.device.type != "cpu"
        self.shadow = Shadow(model, self.plan, mesh)
        self.whole = self.shadow
        if "tp" in mesh.axes:
            self.whole = Shadow(model, *unsharded(self.plan, mesh), self.shadow.opaque)
        for shadow in {self.shadow, self.whole} if options.loss_only else ():
            drop_logits(shadow.module)
        self.agreement = Agreement(mesh)
        self.signatures: dict[object, Signature] = {}
        self.repeats, self.replay = False, cast("Replay | None", None)
        self.cache_memory: dict[object, CacheMemory] = {}
        self.dropped: dict[str, Tensor] = {}
        self.connection = Connection()
        self.seeds = Seeds(mesh)
        self.checked_steps = self.loads = self.saves = self.generations = 0
        self.checks_every_input = False
        self.accumulation = Accumulation()
        self.__signature__ = inspect.signature(type(model).forward.__get__(model))

    def bind(self, forward: Callable[..., Any] | None = None) -> None:
        """Make the model a compiled one: DTensor parameters, this object or `forward` as forward, refusals."""
        model = self.model
        self.store = ParameterStore(model, self.plan, self.mesh, self.connection.shards)
        self.arguments = GraphArguments(model, self.mesh, self.store, self.accumulation)
        model.forward = forward or self
        model.sharding_plan = self.plan
        refuse_methods(model)
        refuse_inner_calls(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.agreement.calls += 1
        if self.replay is not None and not args and (inputs := self.replay.again(kwargs)) is not None:
            return self._returned(self.replay.program, self._run(self.replay.program, inputs), self.replay.cache)
        with self.agreement.refusing():  # the others may have bound theirs, such as a batch that is not empty
            call = bind(self.__signature__, args, kwargs, getattr(self.model, "config", None))
            self.store.current()
        if call.cache is not None and call.cache.static:
            call = replace(call, cache=self._with_memory(call, call.cache))
        program = self._program(call)
        if self.checks_every_input:
            self.checked_steps += 1
            self.agreement.same_inputs(f"step{self.checked_steps}", call.named_tensors, 0)
        captured = program.captured
        inputs = self._ready(program, call.tensors, {} if call.cache is None else call.cache.named_values)
        began = call.cache is not None and call.cache.empty  # another program than behind tokens
        outputs = self._run(program, inputs)
        if call.cache is not None and captured.cache is not None:
            captured.cache.apply(call.cache, outputs[captured.returned :], partial(captured.evaluate, sizes=call.sizes))
            captured.cache.mark(call.cache.cache, program.shards)
        if self.repeats and not args and not self.checks_every_input and not began:
            self.replay = Replay.of(program, program.inputs, inputs, kwargs)
        return self._returned(program, outputs, None if call.cache is None else call.cache.cache)

    def _returned(self, program: Program, outputs: list[Any], cache: Cache | None) -> Any:
        """The model's output class around what its program returned; `cache` is the caller's."""
        captured = program.captured
        seen = captured.returned - len(captured.counted)
        self.dropped = dict(zip(captured.counted, outputs[seen : captured.returned], strict=True))
        returned = outputs[:seen]
        if captured.cache_leaf is not None:
            returned.insert(captured.cache_leaf, cache)
        output = pytree.tree_unflatten(returned, captured.output_spec)
        if self.options.loss_only:
            explain_logits(output)
        return output

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """While active, neither the model nor its modes change from call to call, see `replay.py`."""
        self.repeats = True
        try:
            yield
        finally:
            self.repeats, self.replay = False, None

    def run(self, program: Program, arguments: Sequence[Any], cached: Mapping[str, Any] | None = None) -> list[Any]:
        """Run a program on the caller's tensors (and sizes), in the order of its argument inputs, and on what a cache
        holds, by path."""
        return self._run(program, self._ready(program, arguments, cached or {}))

    def _ready(self, program: Program, arguments: Sequence[Any], cached: Mapping[str, Any]) -> list[Any]:
        """The program's inputs, after what it writes into parameters."""
        with self.agreement.refusing():
            for write in program.captured.parameter_writes:
                write(self.store.local_tensor(write.fqn))
            return self.arguments.of(program.inputs, arguments, cached, self.seeds)

    def _run(self, program: Program, inputs: list[Any]) -> list[Any]:
        self.agreement.begin_run()
        try:
            with no_autocast():
                outputs = list(program.run(*inputs))
            if program.has_collectives:
                self.agreement.watch_backward(outputs)
            if self.offloads:
                finish(self.mesh.device)  # whoever writes to a parameter now must not meet a copy of it
            return outputs
        except Exception as error:
            if (message := failed_check(program.captured.module.graph, error)) is not None:
                error = RuntimeError(message).with_traceback(error.__traceback__)
            if not program.has_collectives:
                raise error
            self.agreement.broke_off(error)

    def _program(self, call: Call) -> Program:
        """The graph that serves this call."""
        options = self.options
        asked = (("memory budget", options.memory_budget), ("async_tp", options.async_tp))
        key = (call.key(), (*model_state(self.model), ("gradients", self.accumulation.mode), *asked))
        if key not in self.signatures:
            self.signatures[key] = self._agree_on_signature(key, call)
        signature = self.signatures[key]
        for program in signature.programs:
            if program.captured.serves(call):
                return program
        dynamic = self.options.dynamic is True or (self.options.dynamic is None and len(signature.programs) > 0)
        try:
            with (
                self.refusing_beside(signature),
                self.agreement.step(f"capture{self.agreement.captures}"),
                no_inference_mode(),
                stages(dist.get_rank() == 0) as stage,
            ):
                program = self._build(call, dynamic, signature, stage)
                if dynamic and not program.captured.serves(call):  # symbols assumed more than this call can give
                    program = self._build(call, False, signature, stage)
                signature.programs.append(program)
        finally:
            if not signature.programs:  # the next call of this signature agrees on it anew
                del self.signatures[key]
        return signature.programs[-1]

    def refusing_beside(self, signature: Signature) -> AbstractContextManager[None]:
        """While a rank makes a further graph of a signature: the others may run those that they have."""
        return self.agreement.refusing() if signature.programs else nullcontext()

    def _agree_on_signature(self, key: tuple[Any, ...], call: Call) -> Signature:
        """All ranks begin the same capture together, and tp ranks with the same inputs."""
        seed = self.agreement.capture_begins(describe(key), call.named_tensors, torch.initial_seed())
        self.seeds.agree(seed)
        return Signature([], [])

    @making_graphs
    def _build(self, call: Call, dynamic: bool, signature: Signature, stage: Callable[[str], None]) -> Program:
        """Capture, transform, agree, lower. Later sizes of a signature are compared with what was agreed before, so
        that one rank may meet a new length by itself."""
        stage(f"capturing {type(self.model).__name__} as one graph")
        started = perf_counter()
        captured = capture(self.shadow, self.model, call, dynamic, growing=self.options.dynamic is not False)
        captured_at = perf_counter()
        sizes = f"Batch {call.batch} and sequence {call.sequence}"
        program = self.finish(captured, signature, stage, sizes, self.whole_capture(call, dynamic))
        program.seconds["capture"] = captured_at - started
        return program

    @making_graphs
    def finish(
        self,
        captured: Captured,
        signature: Signature,
        stage: Callable[[str], None],
        sizes: str,
        whole: Callable[[], Captured] | None = None,
    ) -> Program:
        """Transform, agree, lower. `sizes` names in errors what this capture is for; `whole` see `whole_capture`."""
        stage("running the passes")
        started = perf_counter()
        agree = partial(self._agree_on_recompute, signature)
        run_passes(
            captured, replace(self.pass_context(captured, whole), agree_on_recompute=agree), self.options.disabled
        )
        beside = self._beside_products(captured)
        transformed = perf_counter()
        stage(f"compiling with {self.options.backend}")
        what = f"{type(self.model).__name__}, {sizes[0].lower()}{sizes[1:]}"
        fixed = fixed_inputs(captured, self.mesh.device, what) if self.options.cuda_graphs else None
        groups = {axis.group: axis.name for axis in self.mesh.axes.values()}
        compile = partial(
            lower,
            captured,
            self.options.backend,
            alike=self.mesh.size("tp") > 1,
            disabled=self.options.disabled,
            fixed_inputs=fixed,
            beside_products=beside,
            groups=groups | {copies: groups[group] for group, copies in self.connection.copies.items()},
            copies=self.connection.copies,
        )
        lines = collective_lines(captured.module.graph, groups)
        if signature.programs:
            if lines != signature.collectives:
                raise CaptureError(
                    f"{sizes} need other collectives than the sizes before, so this rank cannot run them alone. Call "
                    "ndcompile.compile or torch.compile with dynamic=True."
                )
            run, graphs = compile()
        else:
            self.agreement.same(f"capture{self.agreement.captures}/collectives", lines, "their collectives")
            signature.collectives = lines
            run, graphs = self.agreement.compile_once(compile) if self.options.backend == "inductor" else compile()
        run = run if fixed is None else Recorded(run, what)
        seconds = {"passes": transformed - started, "lowering": perf_counter() - transformed}
        inputs = [node.meta["input"] for node in captured.placeholders]
        shards = cache_shards(captured, whole, self.plan, self.mesh)
        return Program(captured, run, graphs, inputs, bool(lines), shards, seconds)

    def _beside_products(self, captured: Captured) -> str | None:
        """The process group whose collectives run beside matrix products, if any, with its symmetric memory open."""
        if not self.options.async_tp:
            return None
        group = self.mesh.axes["tp"].group
        check_has_products(captured.module.graph, group, type(self.model).__name__)
        if self.mesh.device.type == "cuda" and self.mesh.backend != "fake":
            connect(group)
        return group

    def _with_memory(self, call: Call, cache: CacheState) -> CacheState:
        """A static cache whose layers have tensors, of this rank's heads. A new one is given them: what they are says a
        capture of the call, in which the layers allocate them."""
        refuse_gradients(self.model)
        if cache.holds_tensors:
            return cache
        key = (call.key(), model_state(self.model))
        if key not in self.cache_memory:
            with self.agreement.step(f"capture{self.agreement.captures}"), no_inference_mode():
                captured = capture(self.shadow, self.model, call, False)
                shards = cache_shards(captured, self.whole_capture(call, False), self.plan, self.mesh)
            self.cache_memory[key] = CacheMemory.of(captured.cache_nodes, shards)
        self.cache_memory[key].allocate(cache.cache, call.batch, self.mesh.device)
        return read_cache(cache.cache, cache.name)

    def _agree_on_recompute(self, signature: Signature, choice: Choice) -> Stages:
        """What all ranks recompute with this signature: later sizes keep to it, as one rank may meet them by itself."""
        if signature.recompute is None:
            found = self.agreement.exchange(f"capture{self.agreement.captures}/recompute", astuple(choice))
            signature.recompute = common([Choice(tuple(stages), *rest) for stages, *rest in found])
        return signature.recompute

    @making_graphs
    def lower_only(self, call: Call) -> Partitioner:
        """Capture and partition this call without running it, weights or other ranks: for inspection."""
        dynamic = self.options.dynamic is True
        captured = capture(self.shadow, self.model, call, dynamic)
        context = self.pass_context(captured, self.whole_capture(call, dynamic))
        run_passes(captured, context, self.options.disabled)
        return lower(captured, "aot_eager", alike=True, disabled=self.options.disabled)[1]

    def pass_context(self, captured: Captured, whole: Callable[[], Captured] | None = None) -> PassContext:
        """What the passes know besides the graph; `whole` see `whole_capture`."""
        dtypes = {slot.entry.fqn: slot.local.dtype for slot in self.store.slots}
        checkpointed = checkpointed_layers(self.model)
        whole_graph = None if whole is None else lambda: whole().module.graph
        return PassContext(
            self.plan,
            self.mesh,
            dtypes,
            captured.fake_mode,
            checkpointed,
            whole_graph,
            self.accumulation.mode,
            self.options.verify,
            layers_of(self.model),
            self.options.memory_budget,
            offloads=self.offloads,
            disabled=self.options.disabled,
        )

    def whole_capture(self, call: Call, dynamic: bool) -> Callable[[], Captured]:
        """Captures the same call in global shapes when it is asked for, once. See `sharded_dims.py`."""
        call = call if call.cache is None else replace(call, cache=call.cache.whole())
        return cache(partial(capture, self.whole, self.model, call, dynamic, growing=self.options.dynamic is not False))
