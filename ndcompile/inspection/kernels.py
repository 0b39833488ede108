"""Seconds of the kernels of a lowered graph, from operations and bytes.

A graph of AOTAutograd is not what runs: inductor fuses pointwise operators, reductions and gathers of rows. The
assumption here is that it fuses all that it may: operators that are connected without a kernel of another kind (matrix
product, attention, collective, sort) between them are one kernel, which reads each of its inputs once, writes what
others use, and is bound by memory. It takes less than the real kernels where a row does not fit on the chip (a softmax
over the vocabulary reads it twice). Views are free.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from ndcompile.graphs.saved_activations import is_view
from ndcompile.inspection.rates import Rates
from ndcompile.inspection.trace import module_of
from ndcompile.operators.host_copies import BACK, COPY
from ndcompile.plans.expert_plan import ALL_TO_ALL, CAPACITY, ExpertPlan
from ndcompile.private.inductor import run_and_save_rng_state, run_with_rng_state

Size = Callable[[Any], int]
"""A size of a fake tensor, which may be symbolic, as a number."""

ATTENTION = "_scaled_dot_product_"
GROUPED = "_grouped_mm"
COLLECTIVES, WAIT = "_c10d_functional", "wait_tensor"
ALONE = frozenset(
    {
        *("sort", "topk", "histc", "searchsorted", "repeat_interleave", "cumsum", "bincount", "nonzero"),
        *("index_put", "scatter_add", "index_add", "embedding_dense_backward", "convolution", "convolution_backward"),
    }
)
"""Operators that inductor leaves to a kernel of their own."""
RANDOM: Mapping[Any, int] = {run_and_save_rng_state: 0, run_with_rng_state: 1}
"""What wraps an operator that may draw random numbers, and which of its arguments is the operator."""
GATHERS = frozenset({"embedding", "gather", "index", "index_select"})
"""Operators that read as many elements of their first input as they return, not all."""
MUCH = 8
"""Times as many bytes as its inputs have: a value that is not worth memory."""
ORDERING = frozenset({"finished_loss", "after"})
"""Operators that read their first input alone; the others are only to be there before it."""


@dataclass(frozen=True)
class Kernels:
    """Seconds of the nodes of one graph. A fused kernel's time is spread over its nodes.

    flops: of matrix products and attention alone. Collectives, waits and views take no time here.
    """

    seconds: Mapping[fx.Node, float]
    flops: Mapping[fx.Node, int]


def kernels(graph: fx.Graph, rates: Rates, size: Size = int, filled: Mapping[str, float] | None = None) -> Kernels:
    """Time every node of a lowered graph. filled: see `filled_rows`.

    Raises ValueError for a dtype that `rates` does not know.
    """
    traffic = _Traffic(graph, size)
    bandwidth = rates.memory_bandwidth * rates.memory_fraction
    seconds = {node: nbytes / bandwidth for node, nbytes in traffic.by_node().items()}
    counted = {node: count for node in graph.nodes if (count := flops(node, size, filled))}
    for node, count in counted.items():
        fraction = rates.attention_fraction if ATTENTION in name_of(node) else rates.matmul_fraction
        # float8 and the like: what is multiplied decides, not what comes out
        dtype = next(n for n in called(node)[1] if isinstance(n, fx.Node)).meta["val"].dtype
        seconds[node] = max(seconds[node], count / (rates.peak(dtype) * fraction))
    return Kernels(seconds, counted)


def called(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """What a node runs, and its positional arguments.

    AOTAutograd wraps operators that may draw random numbers, such as attention, where they are recomputed: forward
    saves the generator's state and backward restores it.
    """
    if node.target in RANDOM:
        first = RANDOM[node.target]
        return node.args[first], node.args[first + 1 :]
    return node.target, node.args


def name_of(node: fx.Node) -> str:
    """Short name of the operator that a node calls; "" for anything else."""
    target = called(node)[0]
    return target._opname if isinstance(target, torch._ops.OpOverload) else ""


def is_collective(node: fx.Node) -> bool:
    """Whether a node starts a collective."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == COLLECTIVES and target._opname != WAIT


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return name_of(node) == WAIT


def tensors(value: Any) -> list[Tensor]:
    """The tensors of a node's value, in tuples inside of it too."""
    if isinstance(value, Tensor):
        return [value]
    return [found for part in value for found in tensors(part)] if isinstance(value, tuple | list) else []


def value_of(node: fx.Node) -> Any:
    """What a node returns, as fakes; of an operator whose generator is saved (`RANDOM`) what is taken from it."""
    if "val" not in node.meta and node.target in RANDOM:
        return tuple(part.meta["val"] for part in node.users if part.target is operator.getitem)
    return node.meta.get("val")


def bytes_of(value: Any, size: Size = int) -> int:
    """Bytes of the tensors of a node's value."""
    return sum(math.prod(map(size, t.shape)) * t.dtype.itemsize for t in tensors(value))


def flops(node: fx.Node, size: Size = int, filled: Mapping[str, float] | None = None) -> int:
    """Floating point operations of a matrix product or attention, by torch's formulas; 0 for other nodes.

    Attention that is causal does half of it. Its backward multiplies five times, forward twice. filled: the part of the
    rows of an experts module that its grouped products multiply; of others they multiply all.
    """
    target, arguments = called(node)
    if not isinstance(target, torch._ops.OpOverload):
        return 0
    name = name_of(node)
    if name.startswith(ATTENTION):
        return _attention_flops(node, size)
    formula = flop_registry.get(target.overloadpacket)
    if formula is None and name != GROUPED:
        return 0
    given: Any = fx.map_arg((arguments, node.kwargs), lambda n: _plain(n.meta["val"], size))
    args, kwargs = given
    if formula is None:
        return int(_grouped_flops(*args[:2]) * (filled or {}).get(module_of(node), 1.0))
    return int(formula(*args, **kwargs, out_val=_plain(node.meta["val"], size)))


def _attention_flops(node: fx.Node, size: Size) -> int:
    """torch's own formula expects as many heads of keys as of queries."""
    target, arguments = called(node)
    backward = target._opname.endswith("backward")
    query, key, value = (n.meta["val"] for n in arguments[backward : backward + 3])
    *outer, rows, width = map(size, query.shape)
    columns, out = size(key.shape[-2]), size(value.shape[-1])
    products = 3 * width + 2 * out if backward else width + out
    count = 2 * math.prod(outer) * rows * columns * products
    named = {argument.name: given for argument, given in zip(target._schema.arguments, arguments, strict=False)}
    return count // 2 if (named | node.kwargs).get("is_causal") else count


def _grouped_flops(left: Tensor, right: Tensor) -> int:
    """Rows of each group times the group's matrix, in all combinations of 2-D (rows of all groups) and 3-D."""
    groups = left.shape[0] if left.ndim == 3 and right.ndim == 2 else 1
    return 2 * left.numel() * right.shape[-1] // groups


def filled_rows(experts: Sequence[ExpertPlan], top_k: int) -> dict[str, float]:
    """FQN of each experts module -> the part of its rows that belong to its rank's experts, when each expert is chosen
    equally often. An all-to-all brings no others; masked rows, and seats that nobody took, are not multiplied."""
    return {plan.fqn: _filled(plan, top_k) for plan in experts}


def _filled(plan: ExpertPlan, top_k: int) -> float:
    if plan.exchange == ALL_TO_ALL:
        return 1.0
    if plan.exchange != CAPACITY or plan.capacity is None:
        return 1.0 / plan.ep
    seats = plan.ep * min(top_k, plan.local) / top_k  # of the worst case, in multiples of an even share
    return min(1.0, 1.0 / min(plan.capacity, seats))


def _plain(value: Any, size: Size) -> Any:
    if isinstance(value, Tensor):
        return torch.empty([size(length) for length in value.shape], dtype=value.dtype, device="meta")
    return size(value) if isinstance(value, torch.SymInt) else value


@dataclass
class _Traffic:
    """Bytes that the kernels of a graph read and write."""

    graph: fx.Graph
    size: Size
    source: dict[fx.Node, fx.Node] = field(default_factory=dict)
    parent: dict[fx.Node, fx.Node] = field(default_factory=dict)
    made: set[fx.Node] = field(default_factory=set)

    def by_node(self) -> dict[fx.Node, float]:
        """Bytes by node: of a fused kernel, spread over its nodes by the size of what they compute."""
        self._fuse()
        self.made = made_in_place_of_use(self.graph, self.size)
        members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self.parent:
            members[self._find(node)].append(node)
        shares: dict[fx.Node, float] = {}
        for group in members.values():
            total, weights = self._moved(group), [bytes_of(value_of(n), self.size) for n in group]
            scale = total / (sum(weights) or 1)
            shares |= {node: weight * scale for node, weight in zip(group, weights, strict=True)}
        return shares

    def _fuse(self) -> None:
        """Join operators that can be one kernel. A level counts the kernels of other kinds on the way to a node, so
        what is joined never waits for a kernel that waits for it."""
        level: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            sources = [self.source[n] for n in node.all_input_nodes]
            self.source[node] = sources[0] if is_view(node) else node
            level[node] = max((level[n] + ends_kernel(n) for n in sources), default=0)
            if not _runs(node):
                continue
            self.parent[node] = node
            for source in sources if fuses(node) else ():
                if source in self.parent and fuses(source) and level[source] == level[node]:
                    self.parent[self._find(source)] = self._find(node)

    def _find(self, node: fx.Node) -> fx.Node:
        while self.parent[node] is not node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def _moved(self, group: list[fx.Node]) -> int:
        """Bytes that a kernel of these nodes reads and writes."""
        inside = set(group)
        read: dict[fx.Node, int] = defaultdict(int)
        for node in group:
            for used in node.all_input_nodes:
                if (source := self.source[used]) not in inside and source not in self.made:
                    read[source] = max(read[source], self._read(node, used))
        outputs = [n for n in group if n not in self.made and any(user not in inside for user in self._users(n))]
        return sum(read.values()) + sum(bytes_of(value_of(n), self.size) for n in outputs)

    def _read(self, node: fx.Node, used: fx.Node) -> int:
        """Bytes of `used`, perhaps a view, that `node` reads. An expanded view has no more bytes than its source."""
        if name_of(node) in ORDERING and used is not node.args[0]:
            return 0
        value, source = (bytes_of(value_of(n), self.size) for n in (used, self.source[used]))
        needed = min(value, source) if is_view(used) else value
        if name_of(node) in GATHERS and used is node.args[0]:
            return min(needed, bytes_of(node.meta["val"], self.size))
        return needed

    def _users(self, node: fx.Node) -> Iterator[fx.Node]:
        for user in node.users:
            if is_view(user):
                yield from self._users(user)
            else:
                yield user


def _runs(node: fx.Node) -> bool:
    """Whether a node is a kernel on the device, or part of one."""
    moves = is_view(node) or is_collective(node) or node.target in (COPY, BACK)
    return bool(node.op == "call_function" and tensors(value_of(node)) and not moves)


def made_in_place_of_use(graph: fx.Graph, size: Size = int) -> set[fx.Node]:
    """Nodes that kernels compute where they need them, instead of reading them: of nothing, such as `full` or `iota`,
    or of much less than they hold, such as a mask of a matrix made of a number for each row."""
    found: set[fx.Node] = set()
    read: dict[fx.Node, int] = {}
    for node in graph.nodes:
        held, sources = bytes_of(value_of(node), size), node.all_input_nodes
        read[node] = held
        if node.op == "call_function" and not sources:
            found.add(node)
            read[node] = 0
        elif is_view(node):
            read[node] = min(held, read[sources[0]])
        elif node.op == "call_function" and fuses(node) and not ends_kernel(node) and all(map(fuses, node.users)):
            needed = sum(read[source] for source in sources)
            if MUCH * needed < held:
                found.add(node)
                read[node] = needed
    return found


def ends_kernel(node: fx.Node) -> bool:
    """Whether what reads a node runs in a later kernel: it is of another kind, or a sum of all, known at its end."""
    value = node.meta.get("val")
    number = isinstance(value, Tensor) and value.ndim == 0
    return not fuses(node) or (number and any(t.ndim for n in node.all_input_nodes for t in tensors(value_of(n))))


def fuses(node: fx.Node) -> bool:
    """Whether inductor may fuse a node with its neighbours. Inputs do not hinder."""
    if node.op != "call_function":
        return True
    target = called(node)[0]
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    name = name_of(node)
    apart = name in ALONE or name == GROUPED or name.startswith(ATTENTION) or target.overloadpacket in flop_registry
    return not apart
