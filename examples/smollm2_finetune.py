"""Fine-tune SmolLM2-135M on fsdp=2 x tp=3: six processes on the CPU, compiled and sharded by ndcompile.

    torchrun --standalone --nproc-per-node 6 examples/smollm2_finetune.py

Needs build/smollm2/ (smollm2_checkpoint.py) and build/reference.json (smollm2_reference.py). Fails unless the loss of
the first step equals the single-process one and the loss falls.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import resource
import sys
import time
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import mean, median

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Table
from smollm2_data import CHECKPOINT, PICTURE, REFERENCE, RESULT, Recipe, batches, packed_text
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import ndcompile

SAME = 1e-5  # relative, for the loss of step 0; float32 cross entropy over 49152 words alone is off by 6e-6 on the CPU
FALL = 0.95  # the mean of the last five losses over the mean of the first five is at most this


@dataclass(frozen=True)
class Step:
    """One training step: the mean of the ranks' losses, the gradient norm before clipping, and the time it took."""

    loss: float
    norm: float
    seconds: float


def mean_over_ranks(loss: torch.Tensor) -> float:
    """The mean of the ranks' losses; tp ranks hold the same value, so this is also the mean over data ranks."""
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def peak_bytes() -> int:
    """The largest resident size that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def train(model: torch.nn.Module, loader: DataLoader, recipe: Recipe, console: Console) -> list[Step]:
    """A plain PyTorch training loop: nothing in it knows that the model is sharded."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    steps: list[Step] = []
    for number, batch in enumerate(islice(loader, recipe.steps)):
        start = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        steps.append(Step(mean_over_ranks(loss), norm.item(), time.perf_counter() - start))
        console.print(
            f"step {number:3}  loss {steps[-1].loss:.4f}  gradient norm {steps[-1].norm:6.2f}  "
            f"{recipe.tokens_per_step / steps[-1].seconds:6.0f} tokens/s"
        )
    return steps


def faults(steps: list[Step], reference: list[float]) -> list[str]:
    """What is wrong with the run; the same on every rank, because every rank has the same numbers."""
    losses = [step.loss for step in steps]
    found = []
    if abs(losses[0] - reference[0]) > SAME * abs(reference[0]):
        found.append(f"loss of step 0 is {losses[0]:.8f}, the single process has {reference[0]:.8f}")
    if len(losses) >= 10 and mean(losses[-5:]) > FALL * mean(losses[:5]):
        found.append(
            f"the loss did not fall: mean {mean(losses[:5]):.4f} of the first 5 steps, "
            f"{mean(losses[-5:]):.4f} of the last 5"
        )
    return found


def summary(steps: list[Step], reference: list[float], peaks: list[int], recipe: Recipe) -> dict:
    """The numbers of the run, as they are kept and shown. The first step, which compiles, is not part of the speed."""
    later = [step.seconds for step in steps[1:]] or [steps[0].seconds]
    return {
        "recipe": asdict(recipe),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "losses": [step.loss for step in steps],
        "gradient_norms": [step.norm for step in steps],
        "reference_losses": reference,
        "relative_differences": [abs(s.loss - ref) / abs(ref) for s, ref in zip(steps, reference, strict=False)],
        "first_step_seconds": steps[0].seconds,
        "median_step_seconds": median(later),
        "tokens_per_second": recipe.tokens_per_step * len(later) / sum(later),
        "peak_bytes": peaks,
    }


def show(result: dict, console: Console) -> None:
    """The numbers as a table."""
    losses, differences = result["losses"], result["relative_differences"]
    table = Table("", "", show_header=False, title="SmolLM2-135M, fsdp=2 x tp=3")
    table.add_row("loss, mean of first 5 and last 5", f"{mean(losses[:5]):.4f} -> {mean(losses[-5:]):.4f}")
    table.add_row("step 0 against one process", f"{losses[0]:.8f}, relative difference {differences[0]:.1e}")
    table.add_row(f"steps 0-{len(differences) - 1} against one process", f"largest difference {max(differences):.1e}")
    table.add_row("first step, with compilation", f"{result['first_step_seconds']:.1f} s")
    table.add_row("later steps", f"{result['tokens_per_second']:.0f} tokens/s")
    for rank, peak in enumerate(result["peak_bytes"]):
        table.add_row(f"peak memory of rank {rank}", f"{peak / 2**30:.2f} GiB")
    console.print(table)


def draw(result: dict) -> None:
    """The loss curve, with the single-process losses on it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(result["losses"], label="ndcompile, fsdp=2 x tp=3, mean of the ranks")
    axes.plot(result["reference_losses"], "o", mfc="none", label="plain transformers, one process")
    axes.set(xlabel="step", ylabel="loss", title="SmolLM2-135M on Python's language reference")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(PICTURE, dpi=150)
    plt.close(figure)


def read_reference(recipe: Recipe) -> list[float]:
    """The single-process losses, which must come from the same batches."""
    if not REFERENCE.exists():
        sys.exit(f"error: {REFERENCE} is missing. Run: python examples/smollm2_reference.py")
    saved = json.loads(REFERENCE.read_text())
    ignored = {"steps", "reference_steps"}
    if odd := {key for key, value in asdict(recipe).items() if saved["recipe"].get(key) != value} - ignored:
        sys.exit(f"error: {REFERENCE} was made with another {', '.join(sorted(odd))}; make it again")
    return saved["losses"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--backend", default="inductor", help="inductor, or aot_eager to debug without it")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    recipe = Recipe(steps=options.steps)
    reference = read_reference(recipe)[: recipe.steps]
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    # Its advice in clip_grad_norm_, to flatten the mesh, would order shards by rank number: see the README's limits.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

    mesh = init_device_mesh("cpu", (recipe.fsdp, recipe.tp), mesh_dim_names=("fsdp", "tp"))
    console = Console(quiet=dist.get_rank() != 0, highlight=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CHECKPOINT))
    start = time.perf_counter()
    model = ndcompile.compile(model, mesh, checkpoint=CHECKPOINT, backend=options.backend)
    if dist.get_rank() == 0:
        print(model.sharding_plan)
    console.print(f"sharded and loaded in {time.perf_counter() - start:.1f} s; the first step compiles")

    rows = packed_text(AutoTokenizer.from_pretrained(CHECKPOINT), recipe.length)
    loader = batches(rows, recipe, ndcompile.data_rank(model), ndcompile.data_world_size(model))
    steps = train(model, loader, recipe, console)

    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak_bytes())
    wrong = faults(steps, reference)
    if dist.get_rank() == 0:
        result = summary(steps, reference, peaks, recipe) | {"backend": options.backend, "faults": wrong}
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
        draw(result)
        show(result, console)
        console.print(*(f"error: {fault}" for fault in wrong), f"picture: {PICTURE}", f"numbers: {RESULT}", sep="\n")
    dist.destroy_process_group()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
