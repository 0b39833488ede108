"""`options` of torch.compile, which may repeat the arguments of `ndcompile.prepare` in any of their spellings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed import DistributedConfig

from ndcompile.byte_sizes import parse_bytes
from ndcompile.errors import NdcompileError
from ndcompile.plans.given_config import config_of


def check_repeated(given: Mapping[str, Any], prepared: Mapping[str, Any]) -> None:
    """Raises NdcompileError unless every option that is `given` means what the model was `prepared` with."""
    for name, value in given.items():
        if name not in prepared:
            raise NdcompileError(f"options[{name!r}] is unknown. ndcompile.prepare takes {sorted(prepared)}.")
        asked, own = _meaning(name, value), _meaning(name, prepared[name])
        if asked != own:
            said, known = _spell(asked, own), _spell(own, asked)
            raise NdcompileError(
                f"options[{name!r}] of torch.compile is {said}, but the model was prepared with {known}. Pass the "
                "same, or leave it out: the preparation decides."
            )


def _meaning(name: str, value: Any) -> Any:
    return value if value is None or name not in _MEANINGS else _MEANINGS[name](value)


_MEANINGS: dict[str, Callable[[Any], Any]] = {
    "distributed_config": config_of,
    "checkpoint": lambda value: os.path.normpath(os.fspath(value)),
    "disable_passes": frozenset,
    "memory_budget": parse_bytes,
}
"""What spellings of an argument have in common."""


def _spell(value: Any, other: Any) -> str:
    """`value` where it differs from `other`."""
    if isinstance(value, DeviceMesh) and repr(value) == repr(other):
        return f"{value!r} of ranks {value.mesh.tolist()}"
    if isinstance(value, DistributedConfig):
        fields = (f"{field}={own!r}" for field, own in vars(value).items() if own != getattr(other, field, None))
        return f"DistributedConfig({', '.join(fields)})"
    return repr(value)
