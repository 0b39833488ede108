"""The first steps of the fine-tuning run in one process with plain transformers: what the ranks are compared with.

A step's loss is the mean over the data ranks of each slice's loss, which is how DDP and FSDP define it.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict

import torch
from rich.console import Console
from smollm2_data import CHECKPOINT, REFERENCE, Recipe, batches, packed_text
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging


def losses(model: PreTrainedModel, rows: torch.Tensor, recipe: Recipe) -> list[float]:
    """The loss of each of the first steps; each step sees the slices of all data ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    slices = [batches(rows, recipe, rank, recipe.fsdp) for rank in range(recipe.fsdp)]
    found = []
    for _, step in zip(range(recipe.reference_steps), zip(*slices, strict=True), strict=False):
        total = 0.0
        for batch in step:
            loss = model(**batch).loss / recipe.fsdp
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


def main() -> None:
    console, recipe = Console(), Recipe()
    if not console.is_terminal:
        logging.disable_progress_bar()
    rows = packed_text(AutoTokenizer.from_pretrained(CHECKPOINT), recipe.length)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).train()
    start = time.perf_counter()
    with console.status(f"one process, {recipe.reference_steps} steps"):
        found = losses(model, rows, recipe)
    seconds = time.perf_counter() - start
    REFERENCE.write_text(json.dumps({"recipe": asdict(recipe), "losses": found}, indent=2) + "\n")
    speed = recipe.reference_steps * recipe.tokens_per_step / seconds
    console.print(
        f"reference: one process, {speed:.0f} tokens/s, losses {[round(x, 6) for x in found]}",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
