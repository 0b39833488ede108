"""Work beside exchanges of tokens: the scheduled graphs compute what the graphs compute as they were lowered."""

import copy
from itertools import product

import pytest
import torch
import torch.distributed as dist
import workers
from matrix import sampled, sampled_rows
from parity_case import Case, assert_parity
from torch import Tensor, fx
from transformers import PreTrainedModel

import ndcompile
from ndcompile.graphs.collective_chains import REDUCTIONS, WAIT, collectives
from ndcompile.graphs.exchanges import ALL_TO_ALL, Surroundings, is_product
from ndcompile.inspection.trace import module_of
from ndcompile.lowering.partition import Partitioner
from ndcompile.lowering.schedule import Schedule
from ndcompile.operators.routing_checks import checked_splits

FSDP2_EP2: workers.Layout = (("ep", 2), ("fsdp", 2))
EP2_TP2: workers.Layout = (("ep", 2), ("tp", 2))

MODELS = {
    "deepseek_v3": {"num_hidden_layers": 2, "first_k_dense_replace": 1},
    "qwen2_moe": {"num_hidden_layers": 2},
}
"""Routed experts first in deepseek_v3, shared experts first in qwen2_moe."""


def _model(name: str, layout: workers.Layout) -> PreTrainedModel:
    config = {"ep_implementation": "all_to_all"}
    return workers.compiled(name, layout, None, MODELS[name], backend="aot_eager", distributed_config=config)


def _scheduled(module: fx.GraphModule, disabled: tuple[str, ...]) -> fx.GraphModule:
    module = copy.deepcopy(module)
    Schedule(["reuse_layers", *disabled])(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def _step(graphs: Partitioner, disabled: tuple[str, ...]) -> list[Tensor]:
    """What forward returns and backward's gradients, on numbers that depend on the rank."""
    forward, backward = _scheduled(graphs.forward, disabled), _scheduled(graphs.backward, disabled)
    generator = torch.Generator().manual_seed(dist.get_rank())
    placeholders = [node for node in forward.graph.nodes if node.op == "placeholder"]
    inputs = [_like(node.meta["val"], generator) for node in placeholders]
    results = forward(*inputs)
    known = dict(zip((node.name for node in placeholders), inputs, strict=True))
    outputs = forward.graph.output_node().args[0]
    known |= {node.name: value for node, value in zip(outputs, results, strict=True) if node is not None}
    wanted = [node for node in backward.graph.nodes if node.op == "placeholder"]
    given = [known[n.name] if n.name in known else _like(n.meta["val"], generator) for n in wanted]
    gradients = backward(*given)
    return [each for each in (*results, *gradients) if isinstance(each, Tensor)]


def _like(fake, generator: torch.Generator):
    if not isinstance(fake, Tensor):
        return fake
    if fake.dtype.is_floating_point:
        return torch.randn(fake.shape, generator=generator, dtype=fake.dtype) * 0.3
    if fake.ndim == 0:  # the rank's place along an axis
        return torch.zeros((), dtype=fake.dtype)
    return torch.randint(0, 128, fake.shape, generator=generator, dtype=fake.dtype)


def _differences(name: str, layout: workers.Layout) -> tuple[int, int, bool]:
    """Results compared, how many of them are not equal bit by bit, and whether the pass moved something."""
    graphs = ndcompile.lower_only(_model(name, layout), 2, 8)
    plain, moved = _step(graphs, ("overlap_dispatch",)), _step(graphs, ())
    equal = [torch.equal(a, b) for a, b in zip(plain, moved, strict=True)]
    orders = [
        [node.name for node in _scheduled(graphs.backward, off).graph.nodes] for off in ((), ("overlap_dispatch",))
    ]
    return len(equal), equal.count(False), orders[0] != orders[1]


@pytest.mark.parametrize(("name", "layout"), sampled_rows(product(MODELS, [FSDP2_EP2, EP2_TP2]), 0))
def test_loss_and_all_gradients_are_bit_equal(ranks, name, layout):
    for compared, different, moved in ranks(_differences, name, layout):
        assert compared > 50
        assert different == 0
        assert moved


@pytest.mark.slow
@pytest.mark.parametrize("disabled", [(), ("overlap_dispatch",)])
def test_parity(ranks, checkpoint, disabled):
    """Of the code that inductor writes; the tests above run the graphs as they are."""
    one = {"num_hidden_layers": 1}
    exchange = {"distributed_config": {"ep_implementation": "all_to_all"}}
    options = {"backend": "inductor", "disable_passes": disabled, **exchange}
    case = Case("qwen2_moe", FSDP2_EP2, padding=True, step=True, overrides=one, options=options)
    assert_parity(ranks, case, checkpoint("qwen2_moe", **one))


def _order(name: str, part: str) -> list[str] | None:
    """Exchanges ("start", "wait"), host reads ("read"), and the modules of products, in the scheduled graph of the last
    layer; on rank 0."""
    model = _model(name, FSDP2_EP2)
    if dist.get_rank():
        return None
    graph = _scheduled(getattr(ndcompile.lower_only(model, 2, 8), part), ("bucket_collectives",)).graph
    exchanges = [each for layer in Surroundings(graph).layers for each in layer]
    labels = {e.start: "start" for e in exchanges} | {e.wait: "wait" for e in exchanges}
    order = []
    for node in graph.nodes:
        if node in labels:
            order.append(labels[node])
        elif node.target is checked_splits:
            order.append("read")
        elif node.target is torch.ops.aten.index.Tensor and any(user.target is ALL_TO_ALL for user in node.users):
            order.append("rows")
        elif is_product(node) and ".mlp." in module_of(node):
            order.append(module_of(node).split(".mlp.")[1])
    middle = order.index("wait", order.index("wait") + 1) + 1
    return order[:middle] if part == "backward" else order[-(len(order) - _last(order, "read") + 1) :]


def _last(order: list[str], label: str) -> int:
    return len(order) - 1 - order[::-1].index(label)


SHARED = {"deepseek_v3": "shared_experts", "qwen2_moe": "shared_expert"}


@pytest.mark.parametrize("name", sampled(MODELS, 1))
def test_shared_experts_run_beside_dispatch_and_combine(ranks, name):
    shared = SHARED[name]
    order = ranks(_order, name, "forward")[0]
    assert [each for each in order if each != "shared_expert_gate"] == [
        "rows", "read", "start", f"{shared}.gate_proj", f"{shared}.up_proj", "wait",
        "start", f"{shared}.down_proj", "wait",
    ]  # fmt: skip


@pytest.mark.parametrize("name", sampled(MODELS, 0))
def test_gradients_of_shared_experts_and_router_run_beside_the_exchange_of_gradients(ranks, name):
    order = ranks(_order, name, "backward")[0]
    first = order[order.index("start") : order.index("wait")]
    products = [f"{SHARED[name]}.{each}" for each in ("down_proj", "up_proj", "gate_proj")]
    assert [each for each in first if each in products] == [each for each in products for _ in range(2)]
    assert "gate" in first


SHAPES = [(2, 8), (1, 37), (1, 1)]


def _collectives(name: str) -> list[list[str]]:
    """What starts in both graphs of this rank, which has a shape of its own."""
    model = _model(name, FSDP2_EP2)
    graphs = ndcompile.lower_only(model, *SHAPES[dist.get_rank() % len(SHAPES)])
    return [_starts(_scheduled(each, ()).graph) for each in (graphs.forward, graphs.backward)]


def _starts(graph: fx.Graph) -> list[str]:
    """Collectives and their groups in order, with how many elements of parameters they move."""
    kinds = (collectives.all_gather_into_tensor.default, *REDUCTIONS)
    lines = []
    for node in graph.nodes:
        if node.target in kinds:
            lines.append(f"{node.target} {node.args[-1]} {node.all_input_nodes[0].meta['val'].numel()}")
        elif node.target is ALL_TO_ALL:
            lines.append(f"{node.target} {node.args[-1]}")
    return lines


@pytest.mark.parametrize("name", sampled(MODELS, 1))
def test_the_order_of_collectives_does_not_depend_on_the_number_of_tokens(ranks, name):
    first, *others = ranks(_collectives, name)
    assert all(order == first for order in others)
    assert all(any(str(ALL_TO_ALL) in line for line in order) for order in first)


def _waits(name: str) -> list[bool]:
    """Of every collective in flight: whether its wait is in the same graph, behind it; on rank 0."""
    model = _model(name, FSDP2_EP2)
    if dist.get_rank():
        return []
    graphs, waits = ndcompile.lower_only(model, 2, 8), []
    for module in (graphs.forward, graphs.backward):
        nodes = list(_scheduled(module, ()).graph.nodes)
        waits += [
            any(user.target is WAIT and nodes.index(user) > nodes.index(node) for user in node.users)
            for node in nodes
            if getattr(node.target, "namespace", "") == "_c10d_functional" and node.target is not WAIT
        ]
    return waits


def test_every_collective_is_waited_for_behind_its_start(ranks):
    waits = ranks(_waits, "qwen2_moe")[0]
    assert len(waits) > 12
    assert all(waits)
