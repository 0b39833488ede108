"""Speed of greedy decoding beside transformers' own tensor parallelism on the same GPUs: a JSON line a case and batch.

    torchrun --nproc-per-node=2 bench/decode.py --case ndcompile-dynamic ndcompile-static ndcompile-graphs \
        hf-eager hf-compile --out results.jsonl

Cases, all under tp over all ranks:
    ndcompile-dynamic   ndcompile.compile, the cache grows
    ndcompile-static    the same, cache_implementation="static"
    ndcompile-graphs    the same with cuda_graphs=True
    hf-eager            transformers' DistributedConfig, the cache grows
    hf-compile          the same, cache_implementation="static", which generate compiles on GPUs by itself
Llama-3-8B widths, or with --model moe those of Qwen3-30B-A3B, whose experts are shared out over the same ranks (ep =
tp, in fixed shapes: every rank computes its experts' part for all tokens). Random weights and tokens. Every batch
begins with a new model, and with --warm-up calls of generate, the first of which compiles. Reported: seconds of that
first call, milliseconds of the prompt (a generate of one token), milliseconds a token behind it, tokens/s of all
sequences behind the prompt, peak memory in GB. `agree`: how many of the tokens are those of the first case that ran
with these sizes (kept in the checkpoint's folder), `first_difference`: the first place where a sequence differs. In
bf16 close logits round to another order, and all that follows differs then: --dtype float32 compares what is computed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

import ndcompile

CASES: dict[str, tuple[bool, dict[str, Any], dict[str, Any]]] = {
    "ndcompile-dynamic": (True, {}, {}),
    "ndcompile-static": (True, {}, {"cache_implementation": "static"}),
    "ndcompile-graphs": (True, {"cuda_graphs": True}, {"cache_implementation": "static"}),
    "hf-eager": (False, {}, {}),
    "hf-compile": (False, {}, {"cache_implementation": "static"}),
}
"""Name -> whether ndcompile runs it, options of ndcompile.compile, options of generate."""

WIDTHS = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 1024,
    },
    "moe": {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
    },
    "tiny-moe": {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "max_position_embeddings": 1024,
    },
}


def config(args: argparse.Namespace) -> PretrainedConfig:
    made: type[PretrainedConfig] = Qwen3MoeConfig if "num_experts" in WIDTHS[args.model] else LlamaConfig
    return made(
        **WIDTHS[args.model],
        num_hidden_layers=args.layers,
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )


def save_checkpoint(args: argparse.Namespace) -> Path:
    """Random weights, written once by rank 0."""
    folder = Path(f"{args.checkpoint}-{args.model}-{args.layers}-{args.dtype}")
    if dist.get_rank() == 0 and not (folder / "config.json").exists():
        torch.manual_seed(0)
        with torch.device(args.device):
            model = AutoModelForCausalLM.from_config(config(args), dtype=getattr(torch, args.dtype))
        model.save_pretrained(folder)
        del model
    dist.barrier()
    return folder


def build(args: argparse.Namespace, case: str, folder: Path) -> Any:
    ours, options, _ = CASES[case]
    sizes = {"tp_size": dist.get_world_size(), "fsdp_size": 1}
    experts = {"ep_size": dist.get_world_size()} if "num_experts" in WIDTHS[args.model] else {}
    dtype, asked = getattr(torch, args.dtype), DistributedConfig(**sizes, **experts)
    if not ours:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, distributed_config=asked).eval()
        return model.to(args.device) if dist.get_world_size() == 1 else model  # one rank is left on the CPU
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(args), dtype=dtype).eval()
    mesh = torch.distributed.device_mesh.init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    if args.backend != "inductor":
        options = {"backend": args.backend} | {name: value for name, value in options.items() if name != "cuda_graphs"}
    return ndcompile.compile(model, mesh, distributed_config=asked, checkpoint=folder, **options)


def seconds(args: argparse.Namespace, call: Callable[[], Any]) -> float:
    synchronize(args)
    start = time.perf_counter()
    call()
    synchronize(args)
    return time.perf_counter() - start


def synchronize(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def measure(args: argparse.Namespace, case: str, batch: int, folder: Path) -> dict[str, Any]:
    model = build(args, case, folder)
    ids = torch.randint(
        1, config(args).vocab_size, (batch, args.prompt), generator=torch.Generator().manual_seed(batch)
    )
    ids = ids.to(args.device)
    arguments = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None} | CASES[case][2]
    tokens = None

    def generate(new: int) -> None:
        nonlocal tokens
        with torch.no_grad():
            tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **arguments)

    first = seconds(args, lambda: generate(args.new))
    for _ in range(args.warm_up - 1):
        generate(args.new)
        generate(1)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    prompt = statistics.median(seconds(args, lambda: generate(1)) for _ in range(args.repeats))
    whole = statistics.median(seconds(args, lambda: generate(args.new)) for _ in range(args.repeats))
    token = (whole - prompt) / (args.new - 1)
    peak = torch.cuda.max_memory_allocated() / 1e9 if args.device == "cuda" else 0.0
    assert tokens is not None
    assert tokens.shape == (batch, args.prompt + args.new)
    return {
        "first_s": round(first, 2),
        "prompt_ms": round(prompt * 1e3, 2),
        "token_ms": round(token * 1e3, 3),
        "tokens_s": round(batch / token, 1),
        "peak_gb": round(peak, 2),
        **agreement(args, case, folder, tokens[:, args.prompt :].tolist()),
    }


def agreement(args: argparse.Namespace, case: str, folder: Path, tokens: list[list[int]]) -> dict[str, Any]:
    """Compare with the first case that ran with these sizes on this checkpoint; rank 0 keeps its tokens."""
    file = folder / f"tokens-{len(tokens)}x{args.prompt}+{args.new}.json"
    kept = json.loads(file.read_text()) if file.exists() else {"case": case, "tokens": tokens}
    dist.barrier()
    if dist.get_rank() == 0 and not file.exists():
        file.write_text(json.dumps(kept))
    dist.barrier()
    pairs = [(a, b) for row, other in zip(tokens, kept["tokens"], strict=True) for a, b in zip(row, other, strict=True)]
    differing = [place % args.new for place, (a, b) in enumerate(pairs) if a != b]
    same = f"{len(pairs) - len(differing)}/{len(pairs)}"
    return {"agree": same, "with": kept["case"], "first_difference": min(differing, default=None)}


def run(args: argparse.Namespace, case: str, batch: int, folder: Path) -> dict[str, Any]:
    """Figures of one case, or its error. What compiled graphs hold is freed, for the next case."""
    result: dict[str, Any] = {
        "case": f"{case}:tp={dist.get_world_size()}",
        "model": args.model,
        "layers": args.layers,
        "dtype": args.dtype,
        "batch": batch,
        "prompt": args.prompt,
        "new": args.new,
    }
    try:
        result |= measure(args, case, batch, folder)
    except Exception as error:  # a peer may fail where the other cases run
        result["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    gc.collect()
    torch._dynamo.reset()
    if args.device == "cuda":
        torch.cuda.empty_cache()
        result["card"] = torch.cuda.get_device_name()
    return result | {"torch": torch.__version__, "transformers": transformers.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, required=True)
    parser.add_argument("--model", choices=WIDTHS, default="llama")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--backend", default="inductor", help="of ndcompile.compile")
    parser.add_argument("--checkpoint", default="build/decode")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--warm-up", type=int, default=3, help="calls of generate before any is measured")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", help="file to append the lines to")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    else:
        dist.init_process_group("gloo")
    folder = save_checkpoint(args)
    for case in args.case:
        for batch in args.batch:
            result = run(args, case, batch, folder)
            if dist.get_rank() == 0:
                print(json.dumps(result), flush=True)
                if args.out:
                    with open(args.out, "a") as out:
                        out.write(json.dumps(result) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
