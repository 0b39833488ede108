"""An ordinary nn.Module under a user's plan against the same module on one process."""

from __future__ import annotations

import plain_model
import pytest
import torch
import workers
from matrix import sampled_rows
from torch import Tensor
from workers import FSDP2_TP2, FSDP4, LIMIT, Comparison, Layout, error, gradient_errors

import ndcompile


def _batch(data_rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(data_rank)
    return torch.randint(0, plain_model.VOCABULARY, (2, 2, 9), generator=generator).unbind()


def _compare(layout: Layout, rules: dict[str, dict[str, str]]) -> Comparison:
    model = ndcompile.compile(plain_model.build(), workers.mesh(layout), distributed_config=rules, backend="aot_eager")
    reference = plain_model.build()
    batches = [_batch(rank) for rank in range(ndcompile.data_world_size(model))]
    loss = model(*batches[ndcompile.data_rank(model)])["loss"]
    loss.backward()
    expected = [reference(*batch)["loss"] for batch in batches]
    torch.stack(expected).mean().backward()
    gradients = gradient_errors(model, {name: p.grad for name, p in reference.named_parameters()})
    return Comparison(error(loss.detach(), expected[ndcompile.data_rank(model)].detach()), gradients)


@pytest.mark.parametrize(
    ("layout", "rules"), sampled_rows([(FSDP2_TP2, {"tp_plan": plain_model.TP_PLAN}), (FSDP4, {})], 0)
)
def test_loss_and_every_gradient(ranks, layout, rules):
    for comparison in ranks(_compare, layout, rules):
        assert not comparison.exceeding(LIMIT)


def _chunked_without_packing() -> None:
    rules = {**plain_model.TP_PLAN, "layers.*.gate_up": "colwise"}
    model = ndcompile.compile(
        plain_model.build(), workers.mesh(FSDP2_TP2), distributed_config={"tp_plan": rules}, backend="eager"
    )
    model(*_batch(0))


def test_half_of_a_shard_is_not_taken_for_half_of_the_whole(ranks):
    """A fused projection that is sharded as one piece would pair the wrong rows: right shapes, wrong numbers."""
    for kind, message in ranks.errors(_chunked_without_packing):
        assert kind == "VerifyError"
        assert "aten.chunk.default in module 'layers.0'" in message
        assert "tp_plan={'layers.*.gate_up': 'packed_colwise'}" in message
