"""Fill a rank's tensors from a safetensors checkpoint, each rank reading only the bytes it holds.

headers         one file's header, checked against the file
catalog         all headers of a checkpoint: key -> blocks of files, dtype, shape
coverage        whether rectangles tile a tensor; proof has the facts about all ranks
layouts         where every rank of a mesh holds what; rank_reads counts its bytes
source          a folder, or a Hub id in the cache; synthetic has headers without files
keys            checkpoint key -> name in the model (renames, base-model prefix, converters)
pieces          rectangles of a tensor and where their elements lie in files
symbolic        tensors that consist of pieces, for converters to run on; reshaping has their views
conversion      a converter run on symbolic tensors, or on real ones
assignment      each target's source; shapes are checked here, before any byte is read
reading         strided bytes of files -> views of local tensors, with preadv
checksum        sums of slices in memory against sums of the files
absence         missing and unexpected keys
initialization  missing parameters, buffers that are not saved
"""

from ndcompile.loader.catalog import CheckpointError
from ndcompile.loader.checksum import Peers
from ndcompile.loader.initialization import initialize_missing, materialize_buffers
from ndcompile.loader.load import LoadReport, load_into
from ndcompile.loader.target import Target, buffer_targets

__all__ = [
    "CheckpointError",
    "LoadReport",
    "Peers",
    "Target",
    "buffer_targets",
    "initialize_missing",
    "load_into",
    "materialize_buffers",
]
