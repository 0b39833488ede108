"""`options` of torch.compile, which may repeat the arguments of `ndcompile.prepare` in any of their spellings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed import DistributedConfig

from ndcompile.byte_sizes import parse_bytes
from ndcompile.errors import NdcompileError
from ndcompile.pipeline import passes_of
from ndcompile.plans.given_config import config_of


def check_repeated(given: Mapping[str, Any], prepared: Mapping[str, Any]) -> None:
    """Raises NdcompileError unless every option that is `given` means what the model was `prepared` with."""
    for name, value in given.items():
        if name not in prepared:
            raise NdcompileError(f"options[{name!r}] is unknown. ndcompile.prepare takes {sorted(prepared)}.")
        try:
            asked, own = _meaning(name, value), _meaning(name, prepared[name])
        except (TypeError, ValueError) as error:
            raise NdcompileError(f"options[{name!r}] of torch.compile is {value!r}: {error}") from error
        if asked != own:
            said, known = _spell(name, value, prepared), _spell(name, prepared[name], given)
            raise NdcompileError(
                f"options[{name!r}] of torch.compile is {said}, but the model was prepared with {known}. Pass the "
                "same, or leave it out: the preparation decides."
            )


def _meaning(name: str, value: Any) -> Any:
    return value if value is None or name not in _MEANINGS else _MEANINGS[name](value)


_MEANINGS: dict[str, Callable[[Any], Any]] = {
    "distributed_config": config_of,
    "checkpoint": lambda value: os.path.abspath(os.fspath(value)),
    "disable_passes": passes_of,
    "memory_budget": parse_bytes,
}
"""What spellings of an argument have in common."""


def _spell(name: str, value: Any, other: Mapping[str, Any]) -> str:
    """`value` where it differs from the `other` side's."""
    value, beside = (_meaning(name, each) if name == "distributed_config" else each for each in (value, other[name]))
    if isinstance(value, DeviceMesh) and repr(value) == repr(beside):
        return f"{value!r} of ranks {value.mesh.tolist()}"
    if isinstance(value, DistributedConfig):
        fields = (f"{field}={own!r}" for field, own in vars(value).items() if own != getattr(beside, field, None))
        return f"DistributedConfig({', '.join(fields)})"
    return repr(value)
