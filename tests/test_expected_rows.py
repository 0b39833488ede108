"""How many rows of tokens inductor is told to expect, where routing decides."""

import models
import torch

import ndcompile
from ndcompile.graphs.saved_activations import EXCHANGE

TOKENS = 64


def test_inductor_expects_the_rows_of_even_routing():
    config = models.config("qwen3_moe")
    plan = ndcompile.plan(config, {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"}, seq_len=TOKENS)
    forward, backward = plan.traced.forward.graph, plan.traced.backward.graph
    exchanges = [
        node for graph in (forward, backward) for node in graph.find_nodes(op="call_function", target=EXCHANGE)
    ]
    rows = [node.meta["val"].shape[0] for node in exchanges]
    decided = [size for size in rows if isinstance(size, torch.SymInt)]
    assert len(decided) >= 2  # to the experts, and gradients to them
    expected = {size.node.shape_env.var_to_hint_override[size.node.expr] for size in decided}
    assert expected == {TOKENS * config.num_experts_per_tok}
