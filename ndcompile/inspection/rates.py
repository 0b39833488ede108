"""How fast a machine computes, reads memory and sends: stated rates, from which times are estimated.

Bandwidths are bytes a second, latencies seconds, both of one rank and one direction. A collective over ranks of several
nodes needs to know how many: ranks are numbered as `init_mesh` numbers them (tp neighbours first, then fsdp, then
dp_replicate), and fill one node after the other.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Rates:
    """Rates of one rank.

    flops: dtype, as torch names it -> peak floating point operations a second. memory_bandwidth: of the device's own
    memory, read or written. link, network: to ranks of the same node and of other nodes; the latency is that of one
    step from rank to rank. launch_latency: what a collective takes before its first step. ranks_a_node: ranks that
    reach each other by the link. Fractions of the peaks that real kernels achieve: matrix products, attention, kernels
    bound by memory, links. hidden_fraction: seconds that kernels lose to a second of a collective that runs beside them
    inside a node.
    """

    name: str
    flops: Mapping[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    link_latency: float
    network_bandwidth: float
    network_latency: float
    ranks_a_node: int
    launch_latency: float = 8.4e-6
    matmul_fraction: float = 0.7
    attention_fraction: float = 0.35
    memory_fraction: float = 0.8
    link_fraction: float = 0.8
    hidden_fraction: float = 0.0

    def peak(self, dtype: torch.dtype) -> float:
        """Peak floating point operations a second. Raises ValueError for a dtype without a rate."""
        name = str(dtype).removeprefix("torch.")
        if name not in self.flops:
            raise ValueError(
                f"The rates {self.name!r} have no floating point rate for {name}, which the model computes in. Known: "
                f"{sorted(self.flops)}. Add flops.{name} to a rates file."
            )
        return self.flops[name]

    def as_row(self) -> dict[str, float | str]:
        """All rates as flat names and numbers, for reports."""
        plain = {name: value for name, value in vars(self).items() if name != "flops"}
        return plain | {f"flops.{name}": value for name, value in self.flops.items()}


HOPPER_FLOPS = {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float64": 67e12, "float8_e4m3fn": 1979e12}
H100_MEMORY, H200_MEMORY = 3.35e12, 4.8e12
NVLINK, NVLINK_STEP = 450e9, 3.4e-6
INFINIBAND, INFINIBAND_STEP = 50e9, 14e-6
NVLINK_DOMAIN, HGX_NODE = 256, 8
HIDDEN_FRACTION = 0.75
"""The one rate that is fitted and not published: steps of H200s on data axes over NVLink, in which NCCL's kernels take
multiprocessors and the power that both share. Five steps gave 0.69 to 0.93 (docs/time-model.md)."""


def _hopper(name: str, memory: float, ranks_a_node: int) -> Rates:
    links = (NVLINK, NVLINK_STEP, INFINIBAND, INFINIBAND_STEP)
    return Rates(name, HOPPER_FLOPS, memory, *links, ranks_a_node=ranks_a_node, hidden_fraction=HIDDEN_FRACTION)


PRESETS: Mapping[str, Rates] = {
    rates.name: rates
    for rates in (
        _hopper("h100-nvlink", H100_MEMORY, NVLINK_DOMAIN),
        _hopper("h200-nvlink", H200_MEMORY, NVLINK_DOMAIN),
        _hopper("h100-infiniband", H100_MEMORY, HGX_NODE),
        _hopper("h200-infiniband", H200_MEMORY, HGX_NODE),
    )
}
"""Published figures.

Peaks, memory and NVLink: NVIDIA's data sheets of the H100 SXM and H200 SXM (dense, without sparsity; float32 without
TF32, as torch computes it by default; 900 GB/s of NVLink in both directions). "-nvlink": all ranks in one NVLink domain
(NVIDIA's H100 white paper: up to 256). "-infiniband": HGX nodes of 8, with one 400 Gb/s adapter a GPU.

Latencies: the constants by which NCCL itself chooses its algorithm (`graph/tuning.cc`, ring, protocol Simple): 8.4 us,
3.4 us a step over NVLink, 14 us over the network. Fractions, one set for all layouts: matrix products 0.7 (the largest
ones reach 0.8 of an H100's peak; training steps have smaller ones, and the power limit lowers the clock), attention
0.35 ("FlashAttention-2 achieves 35% on H100", the paper of FlashAttention-3), memory and links 0.8 (copy kernels;
nccl-tests' bus bandwidth of 8 H100 is about 360 GB/s).
"""

REQUIRED = tuple(
    field.name for field in dataclasses.fields(Rates) if field.default is dataclasses.MISSING and field.name != "name"
)
OPTIONAL = tuple(field.name for field in dataclasses.fields(Rates) if field.default is not dataclasses.MISSING)


def find_rates(name: str) -> Rates:
    """A preset, or the rates of a file.

    Raises ValueError for what is neither, and what `read_rates` raises.
    """
    if name in PRESETS:
        return PRESETS[name]
    if not Path(name).suffix:
        raise ValueError(
            f"rates {name!r} are unknown. Presets: {sorted(PRESETS)}; or the path of a .json or .toml file."
        )
    return read_rates(name)


def read_rates(path: str | Path) -> Rates:
    """Rates from a JSON or TOML file, keys as the fields of `Rates`; `name` defaults to the file's.

    Raises OSError if it cannot be read, and ValueError, with the key and what is legal, for anything else.
    """
    path = Path(path)
    return _parse(path, path.read_text())


def _parse(path: Path, text: str) -> Rates:
    try:
        given = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no {'TOML' if path.suffix == '.toml' else 'JSON'}: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{path} must hold a table of rates, keys {', '.join(REQUIRED)}.")
    if unknown := given.keys() - {"name", *REQUIRED, *OPTIONAL}:
        raise ValueError(
            f"{path} has unknown keys {sorted(unknown)}. Needed: {', '.join(REQUIRED)}. Optional: name, "
            f"{', '.join(OPTIONAL)}."
        )
    if missing := [key for key in REQUIRED if key not in given]:
        raise ValueError(f"{path} lacks {missing}. Bandwidths are bytes a second and latencies seconds, of one rank.")
    flops = given.pop("flops")
    if not isinstance(flops, dict) or not flops:
        raise ValueError(f"{path}: flops must be a table, dtype -> operations a second, such as bfloat16 = 989e12.")
    for name in flops:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"{path}: flops.{name} is no dtype of torch. Use names such as bfloat16 or float32.")
    values = {key: _number(path, key, value) for key, value in given.items() if key != "name"}
    return Rates(
        str(given.get("name", path.stem)),
        {name: _number(path, f"flops.{name}", v) for name, v in flops.items()},
        **values,
    )


def write_rates(path: str | Path, rates: Rates, comment: str) -> None:
    """Write a TOML file that `read_rates` reads, numbers to four digits. comment: lines at its head.

    Raises ValueError for a path that does not end in .toml and for numbers that `read_rates` would refuse, OSError if
    it cannot be written.
    """
    path = check_rates_path(path)
    comment = "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in comment)
    numbers = {name: value for name, value in rates.as_row().items() if isinstance(value, float | int)}
    lines = [
        *(f"# {line}".rstrip() for line in comment.splitlines()),
        f"name = {json.dumps(rates.name, ensure_ascii=False)}",
    ]
    lines += [f"{name} = {_spell(value)}" for name, value in numbers.items() if "." not in name]
    lines += ["", "[flops]", *(f"{name} = {_spell(value)}" for name, value in rates.flops.items())]
    text = "\n".join(lines) + "\n"
    _parse(path, text)
    path.write_text(text)


def check_rates_path(path: str | Path) -> Path:
    """Raises ValueError for a path that does not end in .toml."""
    path = Path(path)
    if path.suffix != ".toml":
        raise ValueError(f"{path}: rates are written as TOML. Give a name that ends in .toml.")
    return path


def _spell(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3e}"


def _number(path: Path, key: str, value: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    may_be_zero = key.endswith("latency") or key == "hidden_fraction"
    if not number or not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
        raise ValueError(f"{path}: {key} must be a number above 0, not {value!r}.")
    if key.endswith("fraction") and value > 1:
        raise ValueError(f"{path}: {key} is a part of a whole, at most 1, not {value!r}.")
    if key == "ranks_a_node" and not isinstance(value, int):
        raise ValueError(f"{path}: ranks_a_node must be a whole number, not {value!r}.")
    return value
