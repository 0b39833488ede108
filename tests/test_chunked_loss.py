"""The graph of a loss in chunks."""

from __future__ import annotations

import functools

import models
import pytest
import torch
from torch import fx

import ndcompile

TOKENS, VOCABULARY, CHUNK = 4096, 1000, 512
"""A chunk has half as many tokens as the model is wide."""


@functools.cache
def lowered(loss_only: bool, **sizes: int) -> ndcompile.Plan:
    config = models.config("llama", hidden_size=1024, vocab_size=VOCABULARY, tie_word_embeddings=False)
    return ndcompile.plan(config, sizes, seq_len=TOKENS, loss_only=loss_only)


def before(node: fx.Node) -> set[fx.Node]:
    """All nodes that a node is made of."""
    found: set[fx.Node] = set()
    left = [node]
    while left:
        left += [source for source in left.pop().all_input_nodes if source not in found and not found.add(source)]
    return found


def products(graph: fx.Graph, rows: int, columns: int) -> list[fx.Node]:
    found = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    return [node for node in found if node.meta["val"].shape == (rows, columns)]


def test_a_chunk_of_logits_is_made_of_the_gradients_of_the_chunk_before():
    # else inductor sums the losses of all chunks in one kernel, for which it keeps the logits of all
    plan = lowered(loss_only=True, fsdp_size=2)
    graph = plan.traced.forward.graph
    logits, gradients = products(graph, CHUNK, VOCABULARY), products(graph, CHUNK, 1024)[-TOKENS // CHUNK :]
    assert len(logits) == len(gradients) == TOKENS // CHUNK
    assert all(gradient in before(after) for gradient, after in zip(gradients, logits[1:], strict=False))


@pytest.mark.slow
def test_the_estimate_multiplies_as_much_with_and_without_chunks():
    for sizes in ({"fsdp_size": 2}, {"tp_size": 2}):
        whole, chunked = (lowered(each, **sizes).report.compute for each in (False, True))
        flops = [{f.name: f.value for f in figures if "FLOPs" in f.name} for figures in (whole, chunked)]
        assert sum(flops[0].values()) == sum(flops[1].values()) > 0


def test_the_estimate_holds_one_chunk_and_its_gradient():
    logits = 2 * TOKENS * VOCABULARY  # bytes, bfloat16
    whole, chunked = ({f.name: f.value for f in lowered(e, fsdp_size=2).report.memory} for e in (False, True))
    assert chunked["parameters"] == whole["parameters"]
    assert whole["peak"] - chunked["peak"] > 0.5 * logits


def test_a_plan_says_whether_the_loss_is_computed_in_chunks():
    assert any("a chunk of tokens at a time" in note for note in lowered(True, fsdp_size=2).report.notes)
    assert not any("loss_only" in note for note in lowered(False, fsdp_size=2).report.notes)
