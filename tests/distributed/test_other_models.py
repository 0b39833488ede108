"""Encoders, vision, encoder-decoder and multimodal models under fsdp and HSDP, against one process."""

import other_models
import pytest
import torch
import workers
from matrix import sampled
from parity_case import step_losses
from workers import FSDP4, LIMIT, REPLICATE2_FSDP2, Comparison, Layout, gradient_errors

import ndcompile


def _compare(name: str, layout: Layout, checkpoint: str) -> Comparison:
    with torch.device("meta"):
        model = other_models.build(name)
    model = ndcompile.compile(model, workers.mesh(layout), checkpoint=checkpoint, backend="eager")
    reference = other_models.build(name)
    batches = [other_models.batch(name, rank) for rank in range(ndcompile.data_world_size(model))]
    loss = step_losses(model, reference, batches)
    return Comparison(loss, gradient_errors(model, {n: p.grad for n, p in reference.named_parameters()}))


@pytest.mark.parametrize("layout", sampled([FSDP4, REPLICATE2_FSDP2], 0))
@pytest.mark.parametrize("name", other_models.MODELS)
def test_loss_and_every_gradient(ranks, tmp_path, name, layout):
    other_models.build(name).save_pretrained(tmp_path)
    for comparison in ranks(_compare, name, layout, str(tmp_path)):
        assert not comparison.exceeding(LIMIT)
