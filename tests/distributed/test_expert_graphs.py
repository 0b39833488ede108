"""The graphs of a MoE layer: what they exchange and how often the host waits, as a closed form and as text."""

import difflib
import os

import pytest
import torch
import torch.distributed as dist
import workers
from golden_text import golden_torch
from matrix import sampled_rows
from test_graphs import GOLDEN
from transformers import PreTrainedModel
from workers import Layout, size

import ndcompile
from ndcompile.graphs.dump import dump
from ndcompile.lowering.partition import Partitioner
from ndcompile.model_calls import compiled_model

EP4: Layout = (("ep", 4),)
EP2_EFSDP2: Layout = (("fsdp", 2), ("ep", 2))
TP2_EP4: Layout = (("ep", 2), ("tp", 2))

HOST_READS = (torch.ops.ndcompile.checked_splits.default,)
"""On a GPU the numbers of rows are copied to the host right before this operator reads them: the one wait."""


def _model(layout: Layout, layers: int, implementation: str = "all_to_all") -> PreTrainedModel:
    config = {"ep_implementation": implementation}
    options = {"backend": "aot_eager", "distributed_config": config}
    return workers.compiled("qwen3_moe", layout, None, {"num_hidden_layers": layers}, **options)


def _lowered(model: PreTrainedModel) -> Partitioner | None:
    """On rank 0: one rank's graph is every rank's."""
    return ndcompile.lower_only(model, 2, 8) if dist.get_rank() == 0 else None


def _counts(layout, layers, implementation):
    graphs = _lowered(_model(layout, layers, implementation))
    if graphs is None:
        return None
    parts = {}
    for name, module in (("forward", graphs.forward), ("backward", graphs.backward)):
        reads = sum(node.target in HOST_READS for node in module.graph.nodes)
        parts[name] = dict(graphs.collective_counts()[name]) | {"host reads": reads}
    return parts


def _layer_cost(layout, implementation):
    """What one more layer adds."""
    one, two = (_counts(layout, layers, implementation) for layers in (1, 2))
    return two and {
        part: {kind: n - one[part].get(kind, 0) for kind, n in two[part].items() if n != one[part].get(kind, 0)}
        for part in two
    }


def _expected(layout, implementation):
    """Closed form of a qwen3_moe layer: 9 dense weights (the router among them) and 2 of experts.

    fsdp: every dense weight is gathered in forward and again in backward, where its gradient is reduced. efsdp: so are
    the experts'. tp: forward sums the output of attention; backward sums the gradients of its input and of the q and k
    norms, which meet the rank's heads.
    Exchange by all-to-all: one for the numbers of rows, one there and one back; backward has no numbers to tell. Under
    tp the tokens are split without a collective and gathered behind; backward gathers the gradients of the tokens and
    of their weights.
    """
    axes = dict(layout)
    tp, efsdp = axes.get("tp", 1), axes.get("fsdp", 1)
    gathered = 9 + (2 if efsdp > 1 else 0)
    forward = {"all_gather_into_tensor": gathered}
    backward = {"all_gather_into_tensor": gathered, "reduce_scatter_tensor": gathered}
    if tp > 1:
        forward["all_reduce"] = 1
        backward["all_reduce"] = 3
    if implementation == "all_gather":  # tokens, indices and weights there, the sum back; indices have no gradient
        forward["all_gather_into_tensor"] += 3
        forward["reduce_scatter_tensor"] = 1
        backward["all_gather_into_tensor"] += 1
        backward["reduce_scatter_tensor"] += 2
    if implementation == "all_to_all":
        forward |= {"all_to_all_single": 3, "host reads": 1}
        backward |= {"all_to_all_single": 2}
        if tp > 1:
            forward["all_gather_into_tensor"] += 1
            backward["all_gather_into_tensor"] += 2
    return {"forward": forward, "backward": backward}


@pytest.mark.parametrize(
    ("layout", "implementation"),
    sampled_rows([(EP2_EFSDP2, "all_to_all"), (TP2_EP4, "all_to_all"), (EP4, "all_gather")], 0),
)
def test_collectives_and_host_reads_of_a_moe_layer_are_a_closed_form(world, layout, implementation):
    assert world(size(layout))(_layer_cost, layout, implementation)[0] == _expected(layout, implementation)


@golden_torch
def test_golden_graph_of_lowered_experts(world):
    """UPDATE_GOLDEN=1 writes the file anew; read the difference."""
    text = world(2)(_text, (("ep", 2),))[0]
    golden = GOLDEN / "lowered" / "qwen3_moe_ep2.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), "\n".join(
        difflib.unified_diff(golden.read_text().splitlines(), text.splitlines(), n=1, lineterm="")
    )


EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default
WAIT = torch.ops._c10d_functional.wait_tensor.default


def _exchanges(recompute):
    """Of the saved values, those that are an exchange in flight; of both graphs' exchanges, the operators behind."""
    model = _model(EP4, 1)
    if recompute:
        model.gradient_checkpointing_enable()
    graphs = _lowered(model)
    if graphs is None:
        return None
    saved = [node for node in graphs.forward.graph.output_node().all_input_nodes if node.target is EXCHANGE]
    nodes = [n for module in (graphs.forward, graphs.backward) for n in module.graph.nodes if n.target is EXCHANGE]
    waits = [WAIT in [user.target for user in node.users] for node in nodes]
    return len(saved), waits


@pytest.mark.parametrize(("recompute", "exchanges"), [(False, 5), (True, 7)])
def test_no_exchange_is_parted_from_its_wait(ranks, recompute, exchanges):
    """Recompute repeats the exchange of tokens and of results, but not that of their numbers."""
    assert ranks(_exchanges, recompute)[0] == (0, [True] * exchanges)


def _text(layout):
    """The lowered nodes of the experts module, forward and backward."""
    model = _model(layout, 1)
    graphs = _lowered(model)
    if graphs is None:
        return None
    groups = {axis.group: name for name, axis in compiled_model(model).mesh.axes.items()}
    parts = {"forward": graphs.forward, "backward": graphs.backward}
    return "\n".join(f"== {name} ==\n{_experts(module.graph, groups)}" for name, module in parts.items())


def _experts(graph, groups):
    """The lines of the experts module; the others are those of a dense model."""
    lines = dump(graph, groups).splitlines()
    return "\n".join(line for line in lines if line.endswith("mlp.experts")) + "\n"
