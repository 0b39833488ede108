"""Parity on GPUs: loss and every gradient of tiny models against the single-process model, float32 and bf16.

    torchrun --nproc-per-node=2 bench/gpu_parity.py tests/zoo_configs --layouts fsdp=2 tp=2 dp_replicate=2
    torchrun --nproc-per-node=4 bench/gpu_parity.py tests/zoo_configs --types qwen3_moe --layouts fsdp=2,tp=2,ep=4

A layout names the axes of the mesh, and `ep` the expert shards (ep_size). --resume also saves model and AdamW through
torch.distributed.checkpoint, loads them into another instance, and compares bits.

float32 (TF32 off): error of a tensor = max|g - ref| / max(max|ref|, 1e-3 x the largest max|ref|), limit 1e-5.
bf16: both sides round, so the yardstick is the rounding itself. The error of ndcompile in bf16 against the float32
reference may be at most twice the error of the single-process bf16 model against the same reference (both in the norm
over all parameters). A model with experts is judged in float32 alone: rounding moves a token to another expert, which
changes gradients by more than rounding does. Its bf16 figures are reported.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import ndcompile
from ndcompile.parameters.layout import boxes, narrow

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Options:
    """dynamo: through torch.compile. disabled: passes to leave out. copy_engines: of ndcompile.compile."""

    dynamo: bool
    disabled: tuple[str, ...]
    copy_engines: bool = False


def build(config: Any, dtype: torch.dtype, folder: Path, skewed: bool) -> Any:
    """The single-process model on the GPU, perturbed constants, saved to `folder` by rank 0."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.unique().numel() == 1:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    if skewed:
        skew(model)
    model = model.to(dtype)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return model.cuda()


def skew(model: Any) -> None:
    """Routers that send every token to experts 0 and 1, or 2 and 3: of 8, half of the ranks of an
    expert group get no row."""
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    for name, router in model.named_parameters():
        if name.endswith(("gate.weight", "router.weight")) and router.ndim == 2:
            rest = router.new_zeros(router.shape[0] - 4, 2)
            directions = torch.stack([router[0], 0.3 * router[1]])
            router.data = 5.0 * torch.cat([signs, rest]).to(router) @ directions.data


def batch(vocabulary: int, data_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(5, vocabulary, (2 * data_ranks, 16), generator=generator).cuda()
    labels = ids.clone()
    labels[0, :9] = -100
    return ids, labels


def reference(model: Any, ids: torch.Tensor, labels: torch.Tensor, data_ranks: int) -> tuple[list[float], Gradients]:
    """Losses of the slices, and the gradients of their mean."""
    losses = []
    for part, target in zip(ids.chunk(data_ranks), labels.chunk(data_ranks), strict=True):
        loss = model(input_ids=part, labels=target, use_cache=False).loss
        (loss / data_ranks).backward()
        losses.append(loss.item())
    return losses, {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


def sharded(config: Any, dtype: torch.dtype, folder: Path | None, layout: dict[str, int], options: Options) -> Any:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    axes = {name: size for name, size in layout.items() if name != "ep"}
    mesh = init_device_mesh("cuda", tuple(axes.values()), mesh_dim_names=tuple(axes))
    asked = DistributedConfig(tp_size=layout.get("tp", 1), fsdp_size=layout.get("fsdp", 1), ep_size=layout.get("ep", 1))
    given = {"distributed_config": asked, "checkpoint": folder, "disable_passes": options.disabled}
    if not options.dynamo:
        return ndcompile.compile(model, mesh, copy_engines=options.copy_engines, **given)
    ndcompile.prepare(model, mesh, **given)
    model.compile(backend="ndcompile", fullgraph=True)
    return model


def same_tokens(exact: Any, config: Any, folder: Path, layout: dict[str, int], options: Options) -> bool:
    """Whether greedy decoding gives the single-process model's tokens on this rank."""
    model = sharded(config, torch.float32, folder, layout, replace(options, dynamo=False)).eval()
    ranks, rank = ndcompile.data_world_size(model), ndcompile.data_rank(model)
    ids, _ = batch(config.get_text_config().vocab_size, ranks)
    arguments = {"max_new_tokens": 16, "do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(ids.chunk(ranks)[rank], **arguments)
    return torch.equal(found, exact.eval().generate(ids.chunk(ranks)[rank], **arguments))


def compiled(
    config: Any, dtype: torch.dtype, folder: Path, layout: dict[str, int], options: Options, resume: bool = False
) -> Any:
    """The loss, the gradients, the data rank, and what a checkpoint did not bring back bit by bit (None: not tried)."""
    model = sharded(config, dtype, folder, layout, options)
    ranks, rank = ndcompile.data_world_size(model), ndcompile.data_rank(model)
    ids, labels = (x.chunk(ranks)[rank] for x in batch(config.get_text_config().vocab_size, ranks))
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # runs on every placement, and changes nothing
    optimizer.step()
    gradients = {n: whole(p.grad).float() for n, p in model.named_parameters() if p.grad is not None}
    changed = None
    if resume:
        other = sharded(config, dtype, None, layout, options)
        ndcompile.init_weights(other, 1)
        changed = resumed(model, optimizer, other, torch.optim.AdamW(other.parameters(), fused=True), folder / "resume")
    return loss.item(), gradients, rank, changed


def resumed(model: Any, optimizer: Any, other: Any, other_optimizer: Any, folder: Path) -> dict[str, float]:
    """The tensors that do not come back bit by bit, with the largest difference on any rank."""

    def state(model: Any, optimizer: Any) -> dict[str, Any]:
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}

    dcp.save(saved := state(model, optimizer), checkpoint_id=folder)
    dcp.load(found := state(other, other_optimizer), checkpoint_id=folder)
    pairs = {name: (found["model"][name], value) for name, value in saved["model"].items()}
    for name, kinds in saved["optimizer"]["state"].items():
        pairs |= {f"{name} {kind}": (found["optimizer"]["state"][name][kind], v) for kind, v in kinds.items()}
    differences = {name: (local(a).double() - local(b).double()).abs().max().item() for name, (a, b) in pairs.items()}
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, differences)
    return {name: largest for name in pairs if (largest := max(found[name] for found in of_all)) > 0}


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Any) -> torch.Tensor:
    """The global tensor from every rank's rectangles; torch 2.11's full_tensor refuses packed layouts."""
    pieces: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, (tensor.device_mesh.get_coordinate(), tensor.to_local().cpu()))
    result = torch.empty(tensor.shape, dtype=tensor.dtype)
    for coordinate, local in pieces:
        for box in boxes(tensor.shape, tensor.placements, tensor.device_mesh.shape, coordinate):
            narrow(result, box.global_offset, box.size).copy_(narrow(local, box.local_offset, box.size))
    return result.cuda()


def worst(found: Gradients, expected: Gradients) -> tuple[float, str]:
    top = max(g.abs().max().item() for g in expected.values())
    return max(
        ((found[n] - g).abs().max().item() / max(g.abs().max().item(), 1e-3 * top), n) for n, g in expected.items()
    )


def distance(found: Gradients, expected: Gradients) -> float:
    """Relative error in the norm over all parameters."""
    error = sum((found[n] - g).square().sum() for n, g in expected.items())
    return (error / sum(g.square().sum() for g in expected.values())).sqrt().item()


def check(config: Any, layout: dict[str, int], folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    ranks = layout.get("fsdp", 1) * layout.get("dp_replicate", 1)
    vocabulary = config.get_text_config().vocab_size
    exact = build(config, torch.float32, folder / "float32", args.skewed)
    losses, expected = reference(exact, *batch(vocabulary, ranks), ranks)
    options = Options(args.torch_compile, tuple(args.disable), args.copy_engines)
    loss, found, rank, changed = compiled(config, torch.float32, folder / "float32", layout, options, args.resume)
    error, name = worst(found, expected)
    rounded = build(config, torch.bfloat16, folder / "bf16", args.skewed)
    _, single = reference(rounded, *batch(vocabulary, ranks), ranks)
    _, ours, _, _ = compiled(config, torch.bfloat16, folder / "bf16", layout, options)
    tokens = same_tokens(exact, config, folder / "float32", layout, options) if args.generate else None
    experts = any(".experts." in name for name in expected)
    single_error, our_error = distance(single, expected), distance(ours, expected)
    return {
        "float32 loss error": abs(loss - losses[rank]) / abs(losses[rank]),
        "float32 worst gradient": error,
        "of": name,
        "bf16 single-process error": single_error,
        "bf16 ndcompile error": our_error,
        "changed by a checkpoint": changed,
        "same tokens": tokens,
        "ok": bool(error < 1e-5 and (experts or our_error < 2 * single_error) and not changed and tokens is not False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path)
    parser.add_argument("--types", nargs="*", help="model types; default: all configs in the folder")
    parser.add_argument("--layouts", nargs="+", default=["fsdp=2", "tp=2"])
    parser.add_argument("--resume", action="store_true", help="also check a round trip through a checkpoint")
    parser.add_argument("--skewed", action="store_true", help="route all tokens to the first four experts")
    parser.add_argument("--torch-compile", action="store_true", help="by ndcompile.prepare and torch.compile")
    parser.add_argument("--disable", nargs="*", default=[], help="passes of ndcompile to leave out")
    parser.add_argument("--copy-engines", action="store_true", help="of ndcompile.compile")
    parser.add_argument("--generate", action="store_true", help="also compare the tokens of greedy decoding")
    parser.add_argument("--work", type=Path, default=Path("build/gpu-parity"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.copy_engines and args.torch_compile:
        parser.error("--copy-engines is an option of ndcompile.compile, not of ndcompile.prepare")
    transformers.logging.set_verbosity_error()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    failed = 0
    for path in sorted(args.configs.glob("*.json")):
        if args.types and path.stem not in args.types:
            continue
        config = AutoConfig.for_model(**json.loads(path.read_text()))
        for text in args.layouts:
            layout = {n: int(s) for n, s in (part.split("=") for part in text.split(","))}
            try:
                result = check(config, layout, args.work / path.stem, args)
            except ndcompile.NdcompileError as error:
                result = {"ok": False, "refused": str(error)[:300]}
            failed += not result["ok"]
            if dist.get_rank() == 0:
                line = json.dumps(
                    {"model": path.stem, "layout": text, "skewed": args.skewed, "torch.compile": args.torch_compile}
                    | ({"disabled": args.disable} if args.disable else {})
                    | ({"copy_engines": True} if args.copy_engines else {})
                    | result
                )
                print(line, flush=True)
                if args.out:
                    with args.out.open("a") as out:
                        out.write(line + "\n")
    dist.destroy_process_group()
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
