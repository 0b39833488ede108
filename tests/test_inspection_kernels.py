"""Seconds of kernels, from operations and bytes."""

from __future__ import annotations

import pytest
import torch
from programs import RATES, Program
from torch import fx

from ndcompile.inspection.kernels import filled_rows, flops, kernels
from ndcompile.plans.expert_plan import ALL_GATHER, ALL_TO_ALL, CAPACITY, ExpertPlan

aten = torch.ops.aten


def test_a_matrix_product_takes_its_operations_at_the_achieved_rate() -> None:
    program = Program()
    product = program.call(aten.mm.default, program.input(4096, 4096), program.input(4096, 4096))
    graph = program.returns(product)
    assert kernels(graph, RATES).seconds[product] == pytest.approx(2 * 4096**3 / 0.5e12)


def test_a_thin_matrix_product_is_bound_by_memory() -> None:
    program = Program()
    product = program.call(aten.mm.default, program.input(1, 4096), program.input(4096, 4096))
    graph = program.returns(product)
    assert kernels(graph, RATES).seconds[product] == pytest.approx(4 * (4096 + 4096**2 + 4096) / 1e9)


def test_the_dtype_of_the_operands_chooses_the_rate() -> None:
    program = Program()
    operands = [program.input(4096, 4096, dtype=torch.bfloat16) for _ in range(2)]
    graph = program.returns(product := program.call(aten.mm.default, *operands))
    assert kernels(graph, RATES).seconds[product] == pytest.approx(2 * 4096**3 / 1e12)


def test_a_dtype_without_a_rate_is_named() -> None:
    program = Program()
    operands = [program.input(4, 4, dtype=torch.float16) for _ in range(2)]
    graph = program.returns(program.call(aten.mm.default, *operands))
    with pytest.raises(ValueError, match=r"no floating point rate for float16.*\['bfloat16', 'float32'\]"):
        kernels(graph, RATES)


def test_a_chain_of_pointwise_operators_reads_its_inputs_and_writes_its_output() -> None:
    program = Program()
    x, y = program.input(1000), program.input(1000)
    total = program.call(aten.add.Tensor, program.call(aten.exp.default, program.call(aten.neg.default, x)), y)
    assert sum(kernels(program.returns(total), RATES).seconds.values()) == pytest.approx(3 * 4000 / 1e9)


def test_what_a_later_kernel_needs_is_written_and_read_again() -> None:
    """The residual: kept over a matrix product, although its producer and its last use are pointwise."""
    program = Program()
    x, weight = program.input(100, 100), program.input(100, 100)
    residual = program.call(aten.neg.default, x)
    product = program.call(aten.mm.default, residual, weight)
    total = program.call(aten.add.Tensor, residual, product)
    seconds = kernels(program.returns(total), RATES).seconds
    assert seconds[residual] == pytest.approx(2 * 40000 / 1e9)
    assert seconds[total] == pytest.approx(3 * 40000 / 1e9)


def test_views_and_constants_are_free() -> None:
    program = Program()
    x = program.input(10, 100)
    zeros = program.call(aten.full.default, [1000], 1.0)
    total = program.call(aten.add.Tensor, program.call(aten.view.default, x, [1000]), zeros)
    seconds = kernels(program.returns(total), RATES).seconds
    assert sum(seconds.values()) == pytest.approx(2 * 4000 / 1e9)


def test_an_embedding_reads_the_rows_that_it_returns() -> None:
    program = Program()
    table, ids = program.input(100000, 16), program.input(10, dtype=torch.int64)
    graph = program.returns(program.call(aten.embedding.default, table, ids))
    assert sum(kernels(graph, RATES).seconds.values()) == pytest.approx((2 * 640 + 80) / 1e9)


def attention(causal: bool) -> fx.Node:
    program = Program()
    query, key = program.input(2, 8, 64, 16), program.input(2, 2, 64, 16)
    target = aten._scaled_dot_product_flash_attention_for_cpu.default
    return program.call(target, query, key, key, 0.0, causal, shape=(2, 8, 64, 16))


def test_attention_counts_two_products_of_all_query_heads() -> None:
    assert flops(attention(causal=False)) == 2 * 2 * (2 * 8 * 64 * 64 * 16)


def test_causal_attention_is_half_of_it() -> None:
    assert flops(attention(causal=True)) == flops(attention(causal=False)) // 2


def test_grouped_products_multiply_the_rows_of_this_rank_s_experts() -> None:
    program = Program()
    rows, weights = program.input(128, 16), program.input(4, 16, 32)
    offsets = program.input(4, dtype=torch.int32)
    product = program.call(aten._grouped_mm.default, rows, weights, offsets, shape=(128, 32), module="mlp.experts")
    assert flops(product) == 2 * 128 * 16 * 32
    assert flops(product, filled={"mlp.experts": 0.25}) == 2 * 32 * 16 * 32


def test_how_many_rows_are_this_rank_s_follows_from_the_exchange() -> None:
    plans = [
        ExpertPlan("a", 8, 4, ALL_TO_ALL, ""),
        ExpertPlan("b", 8, 4, ALL_GATHER, ""),
        ExpertPlan("c", 8, 4, CAPACITY, "", 2.0),
        ExpertPlan("d", 8, 4, CAPACITY, "", float("inf")),
    ]
    assert filled_rows(plans, top_k=2) == {"a": 1.0, "b": 0.25, "c": 0.5, "d": 0.25}
