"""Training speed of ndcompile beside its peers on the same GPUs: one JSON line a case.

    torchrun --nproc-per-node=2 bench/train.py --case ndcompile:fsdp=2 --out results.jsonl

A case is SYSTEM:LAYOUT. Systems:
    ndcompile       ndcompile.compile
    hf-eager        transformers' DistributedConfig
    hf-compile      the same with torch.compile(model)
    fsdp2-compile   fully_shard per layer, every layer compiled (fsdp only)
    ddp-compile     DistributedDataParallel, every layer compiled (dp_replicate only)
    single          transformers in eager mode, the whole batch on one GPU (fsdp=1): the losses to compare with
LAYOUT: fsdp=N,tp=N,ep=N, where ep counts expert shards (ep_size); ndcompile also takes dp_replicate=N.
--model llama has Llama-3-8B widths, --model moe those of Qwen3-30B-A3B, --model shared-moe those of
Qwen1.5-MoE-A2.7B, which has shared experts; --exchange is their ep_implementation. Weights are random, tokens too.
Reported: seconds of the first step (compile included), median and minimum milliseconds of a step (forward, backward,
fused AdamW), tokens/s per GPU, MFU (6 N + 12 L width sequence FLOPs a token over 989 TFLOP/s, N without the experts
that a token does not meet, width that of all heads), peak memory in GB, the loss; with --profile the time of
communication, and the part of it that no other kernel hides; with --losses the mean loss of all ranks at every step.
All layouts see the same batches. With --accumulate a step is so many micro-batches, of which ndcompile reduces the
sum of gradients (--reduce-every: each). With --cpu-offload parameters, gradients and moments are in host memory
(ndcompile, transformers and fsdp2-compile), and the milliseconds of the optimizer, which runs there, are reported
too: set OMP_NUM_THREADS, which torchrun makes 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import transformers
from kernel_times import profile
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

import ndcompile
from ndcompile.model_calls import compiled_model

PEAK_FLOPS = 989e12  # H100 and H200, dense bf16


def config(kind: str, layers: int) -> PretrainedConfig:
    if kind == "moe":
        return Qwen3MoeConfig(
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            vocab_size=151936,
            tie_word_embeddings=False,
            use_cache=False,
        )
    if kind == "shared-moe":
        return Qwen2MoeConfig(
            hidden_size=2048,
            intermediate_size=5632,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts=60,
            num_experts_per_tok=4,
            num_hidden_layers=layers,
            num_attention_heads=16,
            num_key_value_heads=16,
            vocab_size=151936,
            tie_word_embeddings=False,
            use_cache=False,
        )
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
        tie_word_embeddings=False,
        use_cache=False,
    )


def sizes_of(case: str) -> dict[str, int]:
    """The sizes of the axes of a case."""
    return {name: int(size) for name, size in (part.split("=") for part in case.partition(":")[2].split(","))}


def save_checkpoint(folder: str, kind: str, layers: int) -> None:
    """Random weights, written once by rank 0."""
    if dist.get_rank() == 0 and not os.path.exists(f"{folder}/config.json"):
        torch.manual_seed(0)
        with torch.device("cuda"):
            AutoModelForCausalLM.from_config(config(kind, layers), dtype=torch.bfloat16).save_pretrained(folder)
        torch.cuda.empty_cache()
    dist.barrier()


def build_ndcompile(args: argparse.Namespace, sizes: dict[str, int]) -> Any:
    with torch.device("meta"):  # from_config with a dtype leaves buffers in float32
        model = AutoModelForCausalLM.from_config(config(args.model, args.layers), dtype=torch.bfloat16)
    options = {"loss_only": args.loss_only, "disable_passes": args.disable, "memory_budget": args.memory_budget}
    options |= {"async_tp": args.async_tp, "copy_engines": args.copy_engines}
    if "dp_replicate" in sizes:  # which DistributedConfig has no word for
        options["mesh"] = init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    else:
        asked: dict[str, Any] = {"enable_sequence_parallel": args.sequence_parallel}
        asked["fsdp_cpu_offload"] = args.cpu_offload
        if args.keep:
            asked["fsdp_plan"] = {"model.layers.*": "keep_full_weight"}
        options["distributed_config"] = distributed_config(sizes, args.exchange, **asked)
    if args.exchange == "all_gather":
        options["dynamic"] = False
    return ndcompile.compile(model.train(), checkpoint=args.checkpoint, **options)


def distributed_config(sizes: dict[str, int], exchange: str, **options: Any) -> DistributedConfig:
    asked = {f"{name}_size": size for name, size in sizes.items()}
    return DistributedConfig(**{"fsdp_size": 1, "tp_size": 1, **asked}, ep_implementation=exchange, **options)


def build_transformers(args: argparse.Namespace, sizes: dict[str, int], compiled: bool) -> Any:
    asked = distributed_config(sizes, args.exchange, fsdp_cpu_offload=args.cpu_offload)
    model = AutoModelForCausalLM.from_pretrained(
        args.checkpoint, dtype=torch.bfloat16, distributed_config=asked
    ).train()
    return torch.compile(model) if compiled else model


def build_single(folder: str) -> Any:
    device = {"": torch.cuda.current_device()}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=device).train()


def build_fsdp2(folder: str, offload: bool) -> Any:
    model = build_single(folder)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for layer in model.model.layers:
        layer.compile()
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return model


def build_ddp(folder: str) -> Any:
    model = build_single(folder)
    for layer in model.model.layers:
        layer.compile()
    return DistributedDataParallel(model)


PLAIN: dict[str, Callable[[argparse.Namespace], Any]] = {
    "single": lambda args: build_single(args.checkpoint),
    "fsdp2-compile": lambda args: build_fsdp2(args.checkpoint, args.cpu_offload),
    "ddp-compile": lambda args: build_ddp(args.checkpoint),
}
"""Systems that need no DistributedConfig."""


def make_step(
    args: argparse.Namespace, model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor, result: dict
) -> Callable[[], torch.Tensor]:
    """A training step; an optimizer that raises is noted and left out, which flatters that case.

    ids: tokens of this rank, (sequences, length).
    """
    batches = [(part, part.clone()) for part in ids.chunk(args.accumulate)]

    def step() -> torch.Tensor:
        losses = []
        for number, (batch, labels) in enumerate(batches, start=1):
            held = number < len(batches) and not args.reduce_every
            with ndcompile.no_sync(model) if held else nullcontext():
                loss = model(input_ids=batch, labels=labels, use_cache=False).loss / len(batches)
                loss.backward()
            losses.append(loss.detach())
        if "optimizer_error" not in result:
            try:
                optimizer.step()
            except RuntimeError as error:
                result["optimizer_error"] = str(error)[:120]
        optimizer.zero_grad()
        return torch.stack([loss.full_tensor() if isinstance(loss, DTensor) else loss for loss in losses]).sum()

    return step


def optimizer_ms(model: Any, optimizer: torch.optim.Optimizer) -> float:
    """Milliseconds of the optimizer alone, with gradients of zeros."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.cuda.synchronize()
    start = time.perf_counter()
    optimizer.step()
    torch.cuda.synchronize()
    return round((time.perf_counter() - start) * 1e3, 1)


def measure(step: Callable[[], torch.Tensor], steps: int, losses: list[torch.Tensor]) -> list[float]:
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(step())
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times


def run(args: argparse.Namespace) -> dict[str, Any]:
    system, sizes = args.case.partition(":")[0], sizes_of(args.case)
    save_checkpoint(args.checkpoint, args.model, args.layers)
    start = time.perf_counter()
    if system == "ndcompile":
        model = build_ndcompile(args, sizes)
    elif system in PLAIN:
        model = PLAIN[system](args)
    else:
        model = build_transformers(args, sizes, compiled=system == "hf-compile")
    torch.cuda.synchronize()
    asked = {"model": args.model} | ({} if args.model == "llama" else {"exchange": args.exchange})
    if system == "ndcompile":
        options = {"loss_only": args.loss_only, "sequence_parallel": args.sequence_parallel, "disabled": args.disable}
        options |= {"memory_budget": args.memory_budget, "async_tp": args.async_tp, "keep": args.keep}
        options["copy_engines"] = args.copy_engines
        asked |= {name: value for name, value in options.items() if value}
    asked |= {"cpu_offload": True} if args.cpu_offload else {}
    result: dict[str, Any] = {
        "case": args.case,
        **asked,
        "layers": args.layers,
        "batch": args.batch,
        "load_s": round(time.perf_counter() - start, 2),
    }
    if args.accumulate > 1:
        result |= {"accumulate": args.accumulate, "reduce_every": args.reduce_every}
    data_ranks = sizes.get("dp_replicate", 1) * sizes.get("fsdp", 1)
    vocabulary = config(args.model, args.layers).vocab_size
    tokens = torch.randint(0, vocabulary, (args.batch, args.sequence), generator=torch.Generator().manual_seed(0))
    ids = tokens.chunk(data_ranks)[dist.get_rank() // (dist.get_world_size() // data_ranks)].cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    step = make_step(args, model, optimizer, ids, result)
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    losses = [step()]
    result["first_loss"] = round(losses[0].item(), 4)
    result["first_s"] = round(time.perf_counter() - start, 2)
    if system == "ndcompile":
        result["compile_s"] = compile_seconds(model)
    measure(step, 2, losses)
    times = measure(step, args.steps, losses)
    if args.profile and dist.get_rank() == 0:
        result |= profile(step, args.profile)
    elif args.profile:
        step()
    loss = step()
    if args.cpu_offload:
        result["optimizer_ms"] = optimizer_ms(model, optimizer)
    if args.losses:
        means = torch.stack(losses)
        dist.all_reduce(means, dist.ReduceOp.AVG)
        result["losses"] = [round(each, 4) for each in means.tolist()]
    return result | figures(args, times, loss, model)


def compile_seconds(model: Any) -> dict[str, float]:
    """Of the first step: capture, passes, and lowering, which compiles forward and backward."""
    programs = [program for signature in compiled_model(model).signatures.values() for program in signature.programs]
    return {name: round(seconds, 1) for program in programs for name, seconds in program.seconds.items()}


def active_parameters(args: argparse.Namespace, model: Any) -> float:
    """Parameters that a token multiplies with: neither the input embedding nor experts that it does not meet."""
    settings = config(args.model, args.layers)
    share = 1.0 if args.model == "llama" else settings.num_experts_per_tok / settings.num_experts
    sizes = {name: p.numel() * (share if ".experts." in name else 1.0) for name, p in model.named_parameters()}
    return sum(sizes.values()) - settings.vocab_size * settings.hidden_size


def shared_memory(model: Any) -> int:
    """Bytes that torch's allocator does not count: what GPUs share with `copy_engines`."""
    if "ndcompile" not in type(model.forward).__module__:
        return 0
    compiled = compiled_model(model)
    slots = sum(group.exchanges.layout.size for group in compiled.mesh.copies.values())
    return slots + sum(len(arena.own) for arena in compiled.connection.arenas)


def figures(args: argparse.Namespace, times: list[float], loss: torch.Tensor, model: Any) -> dict[str, Any]:
    active = active_parameters(args, model)
    median = statistics.median(times)
    tokens, world = args.batch * args.sequence, dist.get_world_size()
    heads = config(args.model, args.layers).num_attention_heads  # of 128 in all models
    flops = (6 * active + 12 * args.layers * heads * 128 * args.sequence) * tokens
    return {
        "ms": round(median * 1e3, 1),
        "min_ms": round(min(times) * 1e3, 1),
        "tokens_s_gpu": round(tokens / median / world),
        "mfu": round(flops / median / world / PEAK_FLOPS, 3),
        "peak_gb": round((torch.cuda.max_memory_allocated() + shared_memory(model)) / 1e9, 2),
        "loss": round(loss.item(), 4),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def arguments(text: str | None) -> argparse.ArgumentParser:
    """The options, with `text` as their description."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True)
    parser.add_argument("--model", choices=("llama", "moe", "shared-moe"), default="llama")
    parser.add_argument("--exchange", default="auto", help="ep_implementation")
    parser.add_argument("--loss-only", action="store_true", help="of ndcompile.compile")
    parser.add_argument("--sequence-parallel", action="store_true", help="ndcompile with enable_sequence_parallel")
    parser.add_argument("--async-tp", action="store_true", help="of ndcompile.compile, with --sequence-parallel")
    parser.add_argument("--copy-engines", action="store_true", help="of ndcompile.compile")
    parser.add_argument("--disable", nargs="*", default=[], help="passes of ndcompile to leave out")
    parser.add_argument("--keep", action="store_true", help="weights of layers gathered in forward, for backward too")
    parser.add_argument("--cpu-offload", action="store_true", help="fsdp_cpu_offload")
    parser.add_argument("--memory-budget", help="of ndcompile.compile, such as 10GB")
    parser.add_argument("--checkpoint", default="build/bench")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4, help="sequences over all ranks")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--reduce-every", action="store_true", help="reduce the gradients of every micro-batch")
    parser.add_argument("--losses", action="store_true", help="write the mean loss of every step")
    parser.add_argument("--profile", help="file for a table of kernels; adds communication times to the line")
    parser.add_argument("--out", help="file to append the line to")
    return parser


def main() -> None:
    args = arguments(__doc__).parse_args()
    args.checkpoint = f"{args.checkpoint}-{args.model}"
    transformers.logging.set_verbosity_error()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if args.cpu_offload:
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    result = run(args)
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
        if args.out:
            with open(args.out, "a") as out:
                out.write(json.dumps(result) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
