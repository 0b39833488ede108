"""Private symbols of torch and transformers: the files of this folder are the only ones that import them.

Tried on torch 2.13 (CPU, gloo) and torch 2.11 (CUDA, NCCL), and on transformers 5.24. All symbols are looked up when
ndcompile is imported, and not in the midst of a run: a missing one is an ImportError with its name.
"""

from __future__ import annotations

from importlib.metadata import version

TRIED = "torch 2.11 and 2.13 with transformers 5.24"

try:
    from ndcompile.private import cuda, distributed, dynamo, inductor, tracing, transformers
except ImportError as error:
    here = f"torch {version('torch')} with transformers {version('transformers')}"
    raise ImportError(
        f"{error}. ndcompile needs this private symbol. It was tried on {TRIED}, and here is {here}: "
        "install one of those."
    ) from error

__all__ = ["TRIED", "cuda", "distributed", "dynamo", "inductor", "tracing", "transformers"]
