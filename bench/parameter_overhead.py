"""Microseconds of the host a parameter and step: what stands between DTensor parameters and the compiled graph.

    python bench/parameter_overhead.py [--layers 80] [--out results.jsonl]

A training step checks that the model still holds its parameters, hands their local tensors to the graph, and wraps the
gradients that come back as DTensors. These three are timed as a step calls them, on one process, for a Llama of tiny
widths with as many layers as asked; in place of the graph stands one autograd node, whose gradients are there already.
Beside them: the same backward to parameters that are plain tensors, which torch alone does, and one to the DTensors
whose gradients are None, which is what autograd's engine takes for nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig

import ndcompile
from ndcompile.model_calls import compiled_model
from ndcompile.parameters.storage import ParameterStore

OURS = ("check", "hand to the graph", "gradients to DTensors")
"""Parts of a step."""


def store(layers: int) -> ParameterStore:
    """The parameters of a rank among two, as fsdp stores them."""
    widths = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 128}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**widths, num_hidden_layers=layers))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = ndcompile.compile(model.train(), init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    ndcompile.init_weights(model, 0)
    return compiled_model(model).store


class Graph(torch.autograd.Function):
    """What a compiled graph is to autograd: all tensors in, one loss out, and gradients, which nobody else holds."""

    @staticmethod
    def forward(ctx, gradients, *tensors):
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx, _):
        gradients = (None, *ctx.gradients)
        ctx.gradients.clear()
        return gradients


def step(parameters: ParameterStore, gradients: list[torch.Tensor], plain: list[torch.Tensor]) -> dict[str, float]:
    """Seconds of each part of one step, and of the peers of its backward."""
    at = [time.perf_counter()]
    parameters.current()
    at.append(time.perf_counter())
    tensors = parameters.local_tensors()
    at.append(time.perf_counter())
    loss = Graph.apply(list(gradients), *tensors)
    begin = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    for slot in parameters.slots:
        slot.parameter.grad = None
    seconds = {"check": at[1] - at[0], "hand to the graph": at[2] - at[1], "gradients to DTensors": end - begin}
    return seconds | {
        "plain gradients": backward(plain, [gradient.clone() for gradient in gradients]),
        "no gradients": backward([slot.parameter for slot in parameters.slots], [None] * len(gradients)),
    }


def backward(parameters: list[torch.Tensor], gradients: list[torch.Tensor | None]) -> float:
    """Seconds of a backward from one node to parameters."""
    loss = Graph.apply(gradients, *parameters)
    begin = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    for parameter in parameters:
        parameter.grad = None
    return end - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", help="file to append the line to")
    args = parser.parse_args()
    parameters = store(args.layers)
    gradients = [torch.zeros_like(slot.buffer) for slot in parameters.slots]
    plain: list[torch.Tensor] = [torch.nn.Parameter(torch.zeros_like(slot.buffer)) for slot in parameters.slots]
    times = [step(parameters, gradients, plain) for _ in range(args.steps + 5)][5:]
    count = len(parameters.slots)
    medians = {name: statistics.median(each[name] for each in times) for name in times[0]}
    result = {
        "parameters": count,
        **{f"{name}, us": round(1e6 * seconds / count, 2) for name, seconds in medians.items()},
        "us a parameter": round(1e6 * sum(medians[name] for name in OURS) / count, 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    print(json.dumps(result))
    if args.out:
        with open(args.out, "a") as out:
            out.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
