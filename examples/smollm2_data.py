"""What the SmolLM2 example scripts share: where things are, the recipe, and the text."""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import PreTrainedTokenizerBase

BUILD = Path(__file__).resolve().parent.parent / "build"
CHECKPOINT = BUILD / "smollm2"
REFERENCE = BUILD / "reference.json"
RESULT = BUILD / "finetune.json"
PICTURE = BUILD / "loss.png"


@dataclass(frozen=True)
class Recipe:
    """The run: small enough for two CPU cores, long enough for the loss to fall clearly."""

    fsdp: int = 2
    tp: int = 3
    batch: int = 2  # sequences of a data rank in one step
    length: int = 64  # tokens of a sequence
    steps: int = 30
    reference_steps: int = 5
    learning_rate: float = 1e-4
    max_norm: float = 1.0
    seed: int = 0

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all data ranks together see in one step."""
        return self.fsdp * self.batch * self.length


def packed_text(tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """Python's own language reference, which every Python ships, as rows of `length` tokens without padding."""
    topics = pydoc_data.topics.topics
    documents = tokenizer([topics[name] for name in sorted(topics)], verbose=False)["input_ids"]
    stream = torch.tensor([token for ids in documents for token in [*ids, tokenizer.eos_token_id]])
    return stream[: len(stream) // length * length].view(-1, length)


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch as causal language models take it; the model itself shifts the labels."""
    ids = torch.stack(rows)
    return {"input_ids": ids, "labels": ids.clone()}


def batches(rows: torch.Tensor, recipe: Recipe, data_rank: int, data_world_size: int) -> DataLoader:
    """The batches of one data rank: data ranks share no row, the ranks of one tp group get the same batches."""
    sampler: DistributedSampler = DistributedSampler(
        rows,  # type: ignore[arg-type]  # a tensor has all that a map-style dataset needs
        num_replicas=data_world_size,
        rank=data_rank,
        seed=recipe.seed,
        drop_last=True,
    )
    return DataLoader(rows, batch_size=recipe.batch, sampler=sampler, collate_fn=collate, drop_last=True)  # type: ignore[arg-type]
