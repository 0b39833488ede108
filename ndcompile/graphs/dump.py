"""A graph as text, one line a node: `name = operator(arguments) | dtype[shape] | module`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.bool: "b8",
}


def dump(graph: fx.Graph, groups: Mapping[str, str]) -> str:
    """Text of a captured or lowered graph. Inputs of a captured one go by their own names (FQNs); `groups` maps process
    groups to axis names."""
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {', '.join(map(_name, node.all_input_nodes))}")
            continue
        if node.op == "placeholder":
            parts = [f"{_name(node)} = {node.meta['input'].kind if 'input' in node.meta else 'input'}"]
        else:
            positional = [_text(value, groups) for value in node.args]
            named = [f"{key}={_text(value, groups)}" for key, value in node.kwargs.items()]
            parts = [f"{node.name} = {_operator(node.target)}({', '.join(positional + named)})"]
        parts.append(_type(node.meta.get("val")))
        parts.append(node.meta.get("custom", {}).get("module", ""))
        lines.append(" | ".join(part for part in parts if part))
    return "\n".join(lines)


def _name(node: fx.Node) -> str:
    return node.meta["input"].name.strip("[']") if "input" in node.meta else node.name


def _text(value: Any, groups: Mapping[str, str]) -> str:
    if isinstance(value, fx.Node):
        return _name(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_text(item, groups) for item in value) + "]"
    if isinstance(value, str):
        return groups.get(value, value)
    return _SHORT[value] if isinstance(value, torch.dtype) and value in _SHORT else str(value)


def _operator(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target._opname if target.namespace in ("aten", "ndcompile") else f"{target.namespace}.{target._opname}"
    return getattr(target, "__name__", str(target))


def _type(value: Any) -> str:
    if not isinstance(value, Tensor):
        return ""
    return f"{_SHORT.get(value.dtype, value.dtype)}[{', '.join(map(str, value.shape))}]"
