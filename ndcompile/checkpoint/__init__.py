"""Save a compiled model: as a Hugging Face folder, and what torch.distributed.checkpoint needs.

save         the phases of a save, and how ranks go through them together
arguments    the arguments of save_pretrained that are refused
reversal     the folder's keys, by transformers' reverse conversion on symbolic tensors
scatter      which part of a key a rank's rectangle of a parameter is
files        which key lies at which byte of which file
rank_writes  what this rank writes
writing      views of local tensors -> strided bytes of files, with pwrite
folder       staging beside the final name, and putting it in place
"""

from ndcompile.checkpoint.arguments import save_method
from ndcompile.checkpoint.save import SaveReport, save

__all__ = ["SaveReport", "save", "save_method"]
