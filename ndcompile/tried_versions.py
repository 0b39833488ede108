"""Private symbols of torch and transformers are looked up when ndcompile is imported, and not in the midst of a run."""

from __future__ import annotations

from importlib.metadata import version

TRIED = "torch 2.11 and 2.13 with transformers 5.24"

try:
    import ndcompile.torch_private
    import ndcompile.transformers_private  # noqa: F401
except ImportError as error:
    here = f"torch {version('torch')} with transformers {version('transformers')}"
    raise ImportError(
        f"{error}. ndcompile needs this private symbol. It was tried on {TRIED}, and here is {here}: "
        "install one of those."
    ) from error
