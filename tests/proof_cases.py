"""Small programs as the proof sees them: a rank's graph, the same code without tp, and what is known of the inputs."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed.tensor import Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from ndcompile.capture.graph_input import COORDINATE, PARAMETER, SEEDS, GraphInput
from ndcompile.capture.trace_graph import mark_differentiable
from ndcompile.operators.chunked_loss import vocabulary_loss
from ndcompile.operators.random_ops import dropout_op
from ndcompile.operators.redistribute import average_gradient, redistribute
from ndcompile.passes.complete_boundaries import complete_boundaries
from ndcompile.private.distributed import StridedShard
from ndcompile.proof.prove import Proof, pair_around, prove

RANKS = 2
SHAPES = {"x": (4, 8, 8), "y": (4, 8, 8), "w": (8, 8), "b": (8,), "ids": (4, 8), "rank": (), "seeds": (2,)}
INPUTS = {"rank": GraphInput(COORDINATE, "tp"), "seeds": GraphInput(SEEDS, "seeds")}


def layouts(text: str) -> dict[str, tuple[str, int, int]]:
    """ "x=S(1) x 2 w=I" as name -> (kind, dim, parts)."""
    found = re.findall(r"(\w+)=(\w)(?:\((\d)\))?(?: x (\d))?", text)
    return {name: (kind, int(dim or 0), int(parts or 1)) for name, kind, dim, parts in found}


def traced(code: str, given: str, ranks: int) -> fx.Graph:
    """`code` of the inputs that `given` names, in the shapes of one of `ranks`.

    P is made of a shard by a sum, R of an invariant value by a redistribution, before the code.
    """
    inputs, kinds = [], layouts(given)
    names = [name for name in SHAPES if re.search(rf"\b{name}\b", code) or name in kinds]
    for name in names:
        kind, dim, _ = kinds.get(name, ("I", 0, 1))
        shape = [*SHAPES[name], 4] if kind == "P" else list(SHAPES[name])
        if kind in ("S", "P"):
            dim = len(shape) - 1 if kind == "P" else dim
            shape[dim] //= ranks
        whole_numbers = name in ("ids", "rank", "seeds")
        inputs.append(torch.zeros(shape, dtype=torch.int64) if whole_numbers else torch.ones(shape, requires_grad=True))

    def move(value: Tensor, src: str, dst: str) -> Tensor:
        return redistribute(value, "tp", ranks, src, dst, None, torch.zeros((), dtype=torch.int64))

    def program(*tensors: Tensor) -> Any:
        scope = dict(zip(names, tensors, strict=True))
        for name, (kind, *_) in kinds.items():
            scope[name] = scope[name].sum(-1) if kind == "P" else scope[name]
            scope[name] = move(scope[name], "I", "R") if kind == "R" else scope[name]
        scope |= {"torch": torch, "F": F, "move": move, "rank": scope.get("rank"), "ranks": ranks}
        scope |= {"average": lambda x: average_gradient(x, "fsdp", 2, "sum")}
        scope |= {"drop": lambda x, seeds, stream: dropout_op(x, 0.5, seeds[stream], 0)}
        scope |= {
            "loss": lambda x, w, ids, rank: vocabulary_loss(
                x, "tp", ranks, w, None, ids.flatten(), 8, -100, 1, torch.float32, [], [], rank
            )
        }
        return [eval(code, scope)]

    graph = make_fx(program, tracing_mode="fake", pre_dispatch=True)(*inputs).graph
    for name, node, example in zip(names, graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["input"], node.meta["val"] = INPUTS.get(name, GraphInput(PARAMETER, name)), example
    graph.eliminate_dead_code()
    mark_differentiable(graph)
    return graph


def proven(code: str, given: str, complete: bool = False) -> tuple[Proof, str]:
    """The proof of `code`, and what it says of the value. complete: with `complete_boundaries`, as in the pipeline."""
    own, whole = traced(code, given, RANKS), traced(code, given, 1)
    plan = {}
    for name in SHAPES:
        kind, dim, parts = layouts(given).get(name, ("I", 0, 1))
        dim = len(SHAPES[name]) if kind == "P" else dim
        sharded = StridedShard(dim, split_factor=parts) if parts > 1 else Shard(dim)
        plan[name] = SimpleNamespace(tp=sharded if kind in "SP" else Replicate(), expert=False)
    sharding: Any = SimpleNamespace(by_name=plan, experts=())
    twins = pair_around(own, whole, sharding)
    if complete:
        axis = SimpleNamespace(group="tp", size=RANKS)
        complete_boundaries(own, SimpleNamespace(plan=sharding, axis=lambda name: axis))  # type: ignore[arg-type]
    proof = prove(own, twins, sharding, "tp", RANKS)
    (result,) = own.output_node().all_input_nodes
    return proof, str(proof.facts[result])


def reasons(proof: Proof) -> list[str]:
    """What is not proven, apart from that the value is not gathered."""
    return [p.reason for p in proof.problems if not p.reason.startswith(("an output of", "it is returned"))]
