"""Runtime: the object that stands in a compiled model's `forward`.

At each call it binds the arguments, looks up the graph of this signature (or captures, lowers and agrees on a new one),
feeds it the parameters' local buffers, and puts the outputs back into the model's output class.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from functools import cache, partial
from time import perf_counter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ndcompile.accumulation import Accumulation
from ndcompile.agreement import Agreement, collective_lines
from ndcompile.asserted_branches import failed_check
from ndcompile.caches import CacheShards, CacheState, read_cache
from ndcompile.call import Call, bind
from ndcompile.capture import Captured, capture
from ndcompile.cuda_graphs import Recorded, fixed_inputs
from ndcompile.errors import AgreementError, NdcompileError, RoutingError
from ndcompile.graph_input import BUFFER, CACHE, COORDINATE, HELD, PARAMETER, SEEDS, VARYING_CACHE, GraphInput
from ndcompile.loader import (
    LoadReport,
    Peers,
    Target,
    buffer_targets,
    initialize_missing,
    load_into,
    materialize_buffers,
)
from ndcompile.loss_only import drop_logits, explain_logits
from ndcompile.lower import Compiled, lower, no_autocast, no_inference_mode
from ndcompile.mesh import StorageMesh
from ndcompile.partition import Partitioner
from ndcompile.pass_context import PassContext
from ndcompile.pipeline import run_passes
from ndcompile.progress import stages
from ndcompile.random_ops import stream_seed
from ndcompile.recompute_choice import Choice, Stages, common
from ndcompile.refusals import check_has_checkpoints, refuse_inner_calls, refuse_methods
from ndcompile.replay import Replay
from ndcompile.shadow import Shadow
from ndcompile.sharded_dims import unsharded
from ndcompile.sharding_plan import ShardingPlan
from ndcompile.signature import checkpointed_layers, describe, layers_of, model_state
from ndcompile.static_caches import CacheMemory, KeptCache, cache_shards, refuse_gradients
from ndcompile.storage import ParameterStore
from ndcompile.together import together


@dataclass
class Program:
    """A compiled graph and the sizes that it serves.

    shards: what the cache's tensors are of the whole ones after a call. seconds: how long capture, passes and lowering
    took.
    """

    captured: Captured
    run: Compiled
    graphs: Partitioner
    inputs: list[GraphInput]
    shards: CacheShards = field(default_factory=CacheShards)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Signature:
    """All programs of one signature, and the collectives and the recomputing that the ranks agreed on for it."""

    programs: list[Program]
    collectives: list[str]
    recompute: Stages | None = None


class CompiledModel:
    """Callable that replaces `model.forward`. Holds the plan, the stored parameters, and one Program a signature."""

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: StorageMesh,
        plan: ShardingPlan,
        *,
        backend: str,
        dynamic: bool | None,
        disabled: frozenset[str],
        loss_only: bool,
        verify: str = "error",
        cuda_graphs: bool = False,
        memory_budget: int | None = None,
    ) -> None:
        self.model, self.mesh, self.backend = model, mesh, backend
        self.cuda_graphs, self.kept_cache = cuda_graphs, KeptCache()
        self.dynamic, self.disabled = dynamic, disabled
        self.plan = plan
        self.shadow = Shadow(model, self.plan, mesh)
        self.whole = self.shadow
        if "tp" in mesh.axes:
            self.whole = Shadow(model, *unsharded(self.plan, mesh), self.shadow.opaque)
        self.loss_only, self.verify, self.memory_budget = loss_only, verify, memory_budget
        for shadow in {self.shadow, self.whole} if loss_only else ():
            drop_logits(shadow.module)
        self.agreement = Agreement(mesh)
        self.signatures: dict[object, Signature] = {}
        self.coordinates = {name: torch.tensor(axis.coordinate, device=mesh.device) for name, axis in mesh.axes.items()}
        self.repeats, self.replay = False, cast("Replay | None", None)
        self.cache_memory: dict[object, CacheMemory] = {}
        self.dropped: dict[str, Tensor] = {}
        self.seed: int | None = None
        self.random_steps = self.checked_steps = self.loads = self.saves = self.generations = 0
        self.checks_every_input = False
        self.accumulation = Accumulation()
        self.__signature__ = inspect.signature(type(model).forward.__get__(model))

    def bind(self, forward: Callable[..., Any] | None = None) -> None:
        """Make the model a compiled one: DTensor parameters, this object or `forward` as forward, refusals."""
        model = self.model
        self.store = ParameterStore(model, self.plan, self.mesh)
        model.forward = forward or self
        model.sharding_plan = self.plan
        refuse_methods(model)
        refuse_inner_calls(model)

    def load(self, source: str | os.PathLike[str], *, strict: bool = True, verify: str | None = None) -> LoadReport:
        """Read this rank's slices and the buffers; see `ndcompile.load`."""
        check_has_checkpoints(self.model)
        targets = self._targets()
        self.loads += 1
        self.agreement.exchange(f"{(name := f'load{self.loads}')}/begin", True)
        peers = None if verify is None else Peers.of(self.agreement, name)
        show = dist.get_rank() == 0
        read = partial(load_into, self.shadow.module, targets, source, strict=strict, verify=peers)
        with self.agreement.step(name):
            report = together(self.agreement, f"{name}/done", lambda stopped: read(progress=show, stopped=stopped))
        self.store.half_loaded = False
        return report

    def init_weights(self, seed: int) -> None:
        """Give every tensor its initial value; see `ndcompile.init_weights`."""
        check_has_checkpoints(self.model)
        targets = self._targets()
        self.loads += 1
        with self.agreement.step(name := f"load{self.loads}"):
            self.agreement.same(f"{name}/seed", [f"seed {seed}"], "the seed of init_weights")
            initialize_missing(self.shadow.module, targets, seed)
        self.agreement.exchange(f"{name}/done", True)
        self.store.half_loaded = False

    def _targets(self) -> list[Target]:
        """This rank's part of every tensor that has to be filled, with memory; until then the model is half loaded."""
        self.store.half_loaded = True
        self.store.materialize()
        materialize_buffers(self.model, self.mesh.device)
        targets = [
            Target(slot.entry.fqn, slot.local, slot.entry.shape, *self.store.layout(slot.entry), slot.entry.aliases)
            for slot in self.store.slots
        ]
        _, mesh_shape, coordinate = self.store.layout(self.store.slots[0].entry)
        return targets + buffer_targets(self.model, mesh_shape, coordinate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.replay is not None and not args and (inputs := self.replay.again(kwargs)) is not None:
            return self._returned(self.replay.program, self._run(self.replay.program, inputs), self.replay.cache)
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
        if self.loss_only:
            explain_logits(output)
        return output

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """While active, neither the model nor its modes change from call to call, see `ndcompile.replay`."""
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
        for write in program.captured.parameter_writes:
            write(self.store.local_tensor(write.fqn))
        return self._inputs(program, arguments, cached)

    def _run(self, program: Program, inputs: list[Any]) -> list[Any]:
        try:
            with no_autocast():
                return list(program.run(*inputs))
        except RoutingError as error:
            self.agreement.give_up(f"rank {dist.get_rank()}: {error}", error)
        except RuntimeError as error:  # a lost connection, if a rank gave up
            if (reason := self.agreement.peer_gave_up()) is not None:
                raise AgreementError(f"A rank left: {reason}") from error
            if (message := failed_check(program.captured.module.graph, error)) is not None:
                raise RuntimeError(message) from error
            raise

    def _program(self, call: Call) -> Program:
        """The graph that serves this call."""
        options = (("gradients", self.accumulation.mode), ("memory budget", self.memory_budget))
        key = (call.key(), (*model_state(self.model), *options))
        if key not in self.signatures:
            self.signatures[key] = self._agree_on_signature(key, call)
        signature = self.signatures[key]
        for program in signature.programs:
            if program.captured.serves(call):
                return program
        dynamic = self.dynamic is True or (self.dynamic is None and len(signature.programs) > 0)
        try:
            with (
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

    def _agree_on_signature(self, key: tuple[Any, ...], call: Call) -> Signature:
        """All ranks begin the same capture together, and tp ranks with the same inputs."""
        seed = self.agreement.capture_begins(describe(key), call.named_tensors, torch.initial_seed())
        self.seed = seed if self.seed is None else self.seed
        return Signature([], [])

    def _build(self, call: Call, dynamic: bool, signature: Signature, stage: Callable[[str], None]) -> Program:
        """Capture, transform, agree, lower. Later sizes of a signature are compared with what was agreed before, so
        that one rank may meet a new length by itself."""
        stage(f"capturing {type(self.model).__name__} as one graph")
        started = perf_counter()
        captured = capture(self.shadow, self.model, call, dynamic, growing=self.dynamic is not False)
        captured_at = perf_counter()
        sizes = f"Batch {call.batch} and sequence {call.sequence}"
        program = self.finish(captured, signature, stage, sizes, self.whole_capture(call, dynamic))
        program.seconds["capture"] = captured_at - started
        return program

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
        run_passes(captured, replace(self.pass_context(captured, whole), agree_on_recompute=agree), self.disabled)
        transformed = perf_counter()
        stage(f"compiling with {self.backend}")
        what = f"{type(self.model).__name__}, {sizes[0].lower()}{sizes[1:]}"
        fixed = fixed_inputs(captured, self.mesh.device, what) if self.cuda_graphs else None
        compile = partial(
            lower, captured, self.backend, alike=self.mesh.size("tp") > 1, disabled=self.disabled, fixed_inputs=fixed
        )
        lines = collective_lines(captured.module.graph, {a.group: a.name for a in self.mesh.axes.values()})
        if signature.programs:
            if lines != signature.collectives:
                raise AgreementError(
                    f"{sizes} need other collectives than the sizes before, so this rank cannot run them alone. Call "
                    "ndcompile.compile or torch.compile with dynamic=True."
                )
            run, graphs = compile()
        else:
            self.agreement.same(f"capture{self.agreement.captures}/collectives", lines, "their collectives")
            signature.collectives = lines
            run, graphs = self.agreement.compile_once(compile) if self.backend == "inductor" else compile()
        run = run if fixed is None else Recorded(run, what)
        seconds = {"passes": transformed - started, "lowering": perf_counter() - transformed}
        inputs = [node.meta["input"] for node in captured.placeholders]
        return Program(captured, run, graphs, inputs, cache_shards(captured, whole, self.plan, self.mesh), seconds)

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

    def lower_only(self, call: Call) -> Partitioner:
        """Capture and partition this call without running it, weights or other ranks: for inspection."""
        dynamic = self.dynamic is True
        captured = capture(self.shadow, self.model, call, dynamic)
        context = self.pass_context(captured, self.whole_capture(call, dynamic))
        run_passes(captured, context, self.disabled)
        return lower(captured, "aot_eager", alike=True)[1]

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
            self.verify,
            layers_of(self.model),
            self.memory_budget,
        )

    def whole_capture(self, call: Call, dynamic: bool) -> Callable[[], Captured]:
        """Captures the same call in global shapes when it is asked for, once. See `ndcompile.sharded_dims`."""
        call = call if call.cache is None else replace(call, cache=call.cache.whole())
        return cache(partial(capture, self.whole, self.model, call, dynamic, growing=self.dynamic is not False))

    def _inputs(self, program: Program, arguments: Sequence[Any], cached: Mapping[str, Any]) -> list[Any]:
        """The graph's inputs in order."""
        consumer = self.accumulation.consumer()
        parameters = iter(self.store.local_tensors(None if consumer is None else consumer.consumed))
        held = self.accumulation.inputs(program.inputs, self.store)
        given = iter(arguments)
        inputs = []
        for spec in program.inputs:
            if spec.kind == PARAMETER:
                inputs.append(next(parameters))
            elif spec.kind == BUFFER:
                inputs.append(self._buffer(spec.name))
            elif spec.kind == COORDINATE:
                inputs.append(self.coordinates[spec.name])
            elif spec.kind == HELD:
                inputs.append(held[spec.name])
            elif spec.kind == SEEDS:
                inputs.append(self._next_seeds())
            elif spec.kind in (CACHE, VARYING_CACHE):
                inputs.append(self._argument(spec.name, cached[spec.name]))
            else:
                inputs.append(self._argument(spec.name, next(given)))
        return inputs

    def _next_seeds(self) -> Tensor:
        """Seeds of this step: one that the tp group shares, one of this rank; both differ between data ranks."""
        assert self.seed is not None
        self.random_steps += 1
        stream = (self.seed, self.random_steps, self.mesh.data_rank)
        seeds = [stream_seed(*stream), stream_seed(*stream, self.mesh.coordinate("tp"))]
        return torch.tensor(seeds, device=self.mesh.device)

    def _buffer(self, name: str) -> Tensor:
        buffer = self.model.get_buffer(name)
        if buffer.is_meta:
            raise NdcompileError(f"Buffer {name!r} is not loaded: call ndcompile.load(model, folder) first.")
        return buffer

    def _argument(self, name: str, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if tensor.ndim and tensor.device.type != self.mesh.device.type:
            raise ValueError(f"Argument {name} is on {tensor.device}, the model on {self.mesh.device}.")
        return tensor.contiguous()
