"""Imported once by the process that ranks are forked from, see pool.py. Importing starts no threads."""

import threading

import torch._dynamo
import torch._inductor.compile_fx
import transformers.modeling_utils
import transformers.models.llama.modeling_llama
import workers

import ndcompile

assert threading.active_count() == 1, "a fork would lose threads that an import started"
__all__ = ["ndcompile", "torch", "transformers", "workers"]
