"""Fill a rank's tensors from a safetensors checkpoint, each rank reading only the bytes it holds.

catalog         headers of the files: key -> file, byte offset, dtype, shape
keys            checkpoint key -> name in the model (renames, base-model prefix, converters)
assignment      each target's source; shapes are checked here, before any byte is read
reading         strided bytes of files -> views of local tensors, with preadv
conversion      keys that need a real converter
absence         missing and unexpected keys
initialization  missing parameters, buffers that are not saved
"""

from ndcompile.loader.catalog import CheckpointError
from ndcompile.loader.initialization import materialize_buffers
from ndcompile.loader.load import LoadReport, load_into
from ndcompile.loader.target import Target, buffer_targets

__all__ = ["CheckpointError", "LoadReport", "Target", "buffer_targets", "load_into", "materialize_buffers"]
