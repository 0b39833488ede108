"""`fsdp_cpu_offload` on GPUs: tiny models with and without it, side by side, through the same steps.

    torchrun --nproc-per-node=2 bench/gpu_offload.py tests/zoo_configs --cases llama:fsdp=2 qwen3_moe:fsdp=2,ep=2

A case is TYPE:LAYOUT, where `ep` counts expert shards (ep_size). Both models run in float32 (TF32 off) on the same
batches; errors are those of bench/gpu_parity.py. One JSON line a case says what was compared, and `wrong` what failed:

    loss, gradients, norm   three AdamW steps with clip_grad_norm_, limit 1e-5; gradients again in every step
    accumulated             two backwards that add on the host, and two micro-batches under no_sync
    in flight               parameters that are overwritten right behind a forward: it ran with the old values
    repeated                ten backwards in a row on wide layers give the same gradients
    saved                   DCP and save_pretrained bring model (and moments) back bit by bit
    tokens                  greedy decoding
    refused                 a process group without a backend for host memory
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import ndcompile
from ndcompile.errors import UnsupportedError

LIMIT = 1e-5
BOTH = "cpu:gloo,cuda:nccl"


def sharded(config: Any, layout: dict[str, int], offload: bool, backend: str) -> Any:
    """A model with the initial weights of seed 0."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    axes = {name: size for name, size in layout.items() if name != "ep"}
    mesh = init_device_mesh("cuda", tuple(axes.values()), mesh_dim_names=tuple(axes))
    asked = {f"{name}_size": size for name, size in {"tp": 1, "fsdp": 1, "ep": 1, **layout}.items()}
    asked = DistributedConfig(**asked, fsdp_cpu_offload=offload)
    model = ndcompile.compile(model, mesh, distributed_config=asked, backend=backend)
    ndcompile.init_weights(model, 0)
    return model


def locals_of(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of this rank's shards, on the host."""
    return {n: (t.to_local() if isinstance(t, DTensor) else t).detach().cpu().clone() for n, t in tensors.items()}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return locals_of({n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest of all tensors; infinite where one side has a tensor that the other lacks."""
    if found.keys() != expected.keys():
        return float("inf")
    top = max((t.abs().max().item() for t in expected.values() if t.numel()), default=0.0)
    errors = [
        (found[n] - t).abs().max().item() / max(t.abs().max().item(), 1e-3 * top, 1e-30)
        for n, t in expected.items()
        if t.numel()
    ]
    return max(errors) if all(e == e for e in errors) else float("nan")


class Pair:
    """The model without offload and the one with it."""

    def __init__(self, config: Any, layout: dict[str, int], backends: tuple[str, str]) -> None:
        self.models = [sharded(config, layout, bool(on), backend) for on, backend in enumerate(backends)]
        self.ranks, self.rank = ndcompile.data_world_size(self.models[0]), ndcompile.data_rank(self.models[0])
        self.vocabulary = config.get_text_config().vocab_size

    def ids(self, seed: int, length: int = 16) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(5, self.vocabulary, (2 * self.ranks, length), generator=generator).cuda()

    def backward(self, seed: int, which: int) -> torch.Tensor:
        ids = self.ids(seed).chunk(self.ranks)[self.rank]
        loss = self.models[which](input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach().cpu()

    def clear(self) -> None:
        for model in self.models:
            model.zero_grad()


def steps(pair: Pair, found: dict[str, float]) -> list[torch.optim.Optimizer]:
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-3) for m in pair.models]
    for seed in range(3):
        losses = [pair.backward(seed, which) for which in (0, 1)]
        plain, offloaded = map(gradients, pair.models)
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in pair.models]
        plain_norm, norm = (n.full_tensor().cpu() if isinstance(n, DTensor) else n.cpu() for n in norms)
        for optimizer in optimizers:
            optimizer.step()
        for name, value in [
            ("loss", error({"": losses[1]}, {"": losses[0]})),
            ("gradients", error(offloaded, plain)),
            ("norm", error({"": norm}, {"": plain_norm})),
        ]:
            found[name] = max(found.get(name, 0.0), value)
        found["bit-equal gradients, first step"] = found.get("bit-equal gradients, first step", -1.0)
        if seed == 0:
            equal = sum(torch.equal(offloaded[n], t) for n, t in plain.items())
            found["bit-equal gradients, first step"] = equal / len(plain)
        pair.clear()
    found["parameters"] = error(*(locals_of(dict(m.named_parameters())) for m in reversed(pair.models)))
    return optimizers


def accumulated(pair: Pair, found: dict[str, float]) -> None:
    for which in (0, 1):
        pair.backward(10, which)
        pair.backward(11, which)
    found["accumulated"] = error(gradients(pair.models[1]), gradients(pair.models[0]))
    pair.clear()
    for which, model in enumerate(pair.models):
        with ndcompile.no_sync(model):
            pair.backward(12, which)
        pair.backward(13, which)
    found["no_sync"] = error(gradients(pair.models[1]), gradients(pair.models[0]))
    pair.clear()


def in_flight(pair: Pair, found: dict[str, float]) -> None:
    """Three times: overwrite all parameters behind a forward, and put them back."""
    ids, worst = pair.ids(20), 0.0
    with torch.no_grad():
        expected = pair.models[0](input_ids=ids, use_cache=False).logits.cpu()
        pair.models[1](input_ids=ids, use_cache=False)
        for _ in range(3):
            kept = [p.to_local().clone() for p in pair.models[1].parameters()]
            logits = pair.models[1](input_ids=ids, use_cache=False).logits
            for p in pair.models[1].parameters():
                p.to_local().fill_(float("nan"))
            worst = max(worst, error({"": logits.cpu()}, {"": expected}))
            for p, value in zip(pair.models[1].parameters(), kept, strict=True):
                p.to_local().copy_(value)
    found["in flight"] = worst


def saved(config: Any, layout: dict[str, int], pair: Pair, optimizer: Any, folder: Path, backend: str) -> list[str]:
    """What does not come back bit by bit."""
    model = pair.models[1]
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder / "dcp")
    expected = locals_of(state["model"])
    other = sharded(config, layout, True, backend)
    second = torch.optim.AdamW(other.parameters(), lr=1e-3)
    loaded = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, second)}
    dcp.load(loaded, checkpoint_id=folder / "dcp")
    values = locals_of(loaded["model"])
    wrong = [f"dcp {name}" for name, value in expected.items() if not torch.equal(values[name], value)]
    moments, again = state["optimizer"]["state"], loaded["optimizer"]["state"]
    for name, each in moments.items():
        if not torch.equal(locals_of(each)["exp_avg"], locals_of(again[name])["exp_avg"]):
            wrong.append(f"dcp moment of {name}")
    ndcompile.save_pretrained(model, folder / "hf")
    ndcompile.load(other, folder / "hf", verify="hash")
    values = locals_of(dict(other.named_parameters()))
    wrong += [f"hf {n}" for n, p in locals_of(dict(model.named_parameters())).items() if not torch.equal(values[n], p)]
    placed = {(p.to_local().device.type, p.to_local().is_pinned()) for p in other.parameters() if p.to_local().numel()}
    return wrong + ([] if placed == {("cpu", True)} else [f"memory of parameters: {placed}"])


def same_tokens(pair: Pair) -> bool:
    ids = pair.ids(30).chunk(pair.ranks)[pair.rank]
    settings = {"max_new_tokens": 8, "do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    return torch.equal(*(model.eval().generate(ids, **settings) for model in pair.models))


def repeated(config: Any, layout: dict[str, int], backend: str) -> float:
    """Wide layers, so that copies take long: the largest error of gradients of ten backwards against the first one."""
    wide = copy.deepcopy(config)
    wide.hidden_size, wide.intermediate_size, wide.vocab_size = 2048, 8192, 8192
    pair = Pair(wide, layout, ("aot_eager", backend))
    pair.backward(0, 0)
    expected, worst = gradients(pair.models[0]), 0.0
    for _ in range(10):
        pair.backward(0, 1)
        worst = max(worst, error(gradients(pair.models[1]), expected))
        pair.clear()
    return worst


def run(config: Any, layout: dict[str, int], folder: Path, backend: str) -> dict[str, Any]:
    started = time.perf_counter()
    pair = Pair(config, layout, (backend, backend))
    found: dict[str, float] = {}
    optimizers = steps(pair, found)
    wrong = saved(config, layout, pair, optimizers[1], folder, backend)
    for model in pair.models:  # from here on the same weights
        ndcompile.load(model, folder / "hf")
    accumulated(pair, found)
    in_flight(pair, found)
    wrong += [] if same_tokens(pair) else ["tokens"]
    if config.model_type == "llama":
        found["repeated"] = repeated(config, layout, backend)
    wrong += [f"{name}: {value}" for name, value in found.items() if "bit" not in name and not value <= LIMIT]
    worst = [torch.tensor(list(found.values())) for _ in range(dist.get_world_size())]
    dist.all_gather_object(worst, torch.tensor(list(found.values())))
    all_wrong: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_wrong, wrong)
    largest = torch.stack(worst).amax(0).tolist()
    return {
        **dict(zip(found, (float(f"{value:.3g}") for value in largest), strict=True)),
        "wrong": sorted({each for rank in all_wrong for each in rank}),
        "seconds": round(time.perf_counter() - started, 1),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def refused(config: Any, layout: dict[str, int], folder: Path) -> str:
    rank, world, store = dist.get_rank(), dist.get_world_size(), folder.resolve() / "store"
    store.unlink(missing_ok=True)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        sharded(config, layout, True, "eager")
    except UnsupportedError as error_:
        return str(error_)
    return "wrong: not refused"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, help="folder with TYPE.json")
    parser.add_argument("--cases", nargs="+", default=["llama:fsdp=2"])
    parser.add_argument("--backend", default="inductor", help="of ndcompile.compile")
    parser.add_argument("--folder", type=Path, default=Path("build/gpu_offload"))
    parser.add_argument("--out", help="file to append the lines to")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.backends.cuda.matmul.allow_tf32 = False
    transformers.logging.set_verbosity_error()
    dist.init_process_group(BOTH)
    for case in args.cases:
        kind, _, text = case.partition(":")
        layout = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
        values = json.loads((args.configs / f"{kind}.json").read_text())
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        folder = args.folder / case.replace("=", "").replace(",", "_").replace(":", "_")
        line = {"case": case, "backend": args.backend, **run(config, layout, folder, args.backend)}
        report(line, args.out)
    report({"case": "refused", "message": refused(config, layout, folder)}, args.out)
    dist.destroy_process_group()


def report(line: dict[str, Any], out: str | None) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(line), flush=True)
        if out:
            with open(out, "a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
