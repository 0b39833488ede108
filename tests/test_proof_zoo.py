"""The proof on whole architectures; all of them, see `make proof`."""

import proof_table
import proof_zoo
import pytest

from ndcompile.errors import VerifyError
from ndcompile.operators.random_ops import attention_op
from ndcompile.pipeline import run_passes
from ndcompile.verify.verifier import SEEDED, verify

TYPES = ["phi3", "deepseek_v2"]
"""Fused projections, and attention whose heads are put together of slices of differently sharded values."""


@pytest.mark.parametrize("model_type", TYPES)
def test_every_damaged_boundary_is_refused(model_type):
    verdict = proof_table.judge(model_type, tp=2)
    assert (verdict.result, verdict.message, verdict.survivors) == ("proven", "", [])
    assert verdict.damaged > 20


def test_every_damage_to_an_exchange_of_tokens_and_to_gradients_over_data_axes_is_refused():
    verdict = proof_table.judge("qwen3_moe", tp=2, layout="fsdp4_ep4")
    assert (verdict.result, verdict.message, verdict.survivors) == ("proven", "", [])
    assert verdict.damaged > 150


def test_indices_without_a_gradient_meet_experts_on_all_tp_ranks():
    verdict = proof_table.judge("gpt_oss", tp=2, layout="fsdp2_ep2")  # it has a bias an expert, read by index
    assert (verdict.result, verdict.message, verdict.survivors) == ("proven", "", [])


def test_one_head_a_rank_asks_for_fewer_contiguous_copies_and_is_proven():
    verdict = proof_table.judge("deepseek_v2", tp=4, damage=False)
    assert (verdict.result, verdict.message) == ("proven", "")


def test_types_that_the_proof_cannot_know_are_refused_before():
    verdict = proof_table.judge("inkling2_text", tp=2, repair=False)
    assert verdict.result == "refused before"
    assert "'model.layers.*.mlp.experts.gate_up_proj': 'packed_colwise'" in verdict.message


def test_a_mask_drawn_from_the_stream_of_other_ranks_is_refused():
    captured, context = proof_zoo.captured("llama", 2, attention_dropout=0.1)
    run_passes(captured, context)
    graph = captured.module.graph
    node = next(node for node in graph.nodes if node.target is attention_op)
    stream = node.args[SEEDED[attention_op]]
    assert stream.args[2] == 1  # every rank has heads of its own
    stream.args = (*stream.args[:2], 0)
    with pytest.raises(VerifyError, match="differs between the ranks of a tp group, but draws from stream 0"):
        verify(graph, context)
