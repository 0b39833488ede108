"""What a Hugging Face folder of a model holds: original keys, each with the elements of the model that it consists of.

transformers' own reverse conversion runs on symbolic tensors, so that per-expert keys, gate and up are rectangles of
the model's tensors. What it computes instead of moving becomes a key that depends on whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ndcompile.errors import UnsupportedError
from ndcompile.loader.headers import Block, Stamp
from ndcompile.loader.pieces import Piece, row_major
from ndcompile.loader.reshaping import Inexpressible
from ndcompile.loader.symbolic import SymbolicTensor
from ndcompile.private.transformers import remove_tied_weights_from_state_dict, revert_weight_conversion

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class SavedTensor:
    """One key of the folder. `pieces` tile it; their blocks' keys are names of the model, offsets and strides count
    elements of the whole, row-major tensor of that name.

    Without pieces it is computed of the whole tensors `computed_of`.
    """

    key: str
    shape: torch.Size
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    computed_of: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def saved_names(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors that `save_pretrained` writes, by their names in the model: tied ones once, under the name that
    transformers keeps.

    Raises UnsupportedError for an entry of the state dict that is no tensor.
    """
    tensors = model.state_dict(keep_vars=True)
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise UnsupportedError(
                f"save_pretrained() of a compiled model: {name!r} in the state dict is a {type(value).__name__}, no "
                "tensor, and has no place in a safetensors file. Remove the module's get_extra_state()."
            )
    for name in model._keys_to_ignore_on_save or ():
        tensors.pop(name, None)
    # By identity of the model's tensors, which is how transformers finds ties of tensors on the meta device.
    shells = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in tensors.items()}
    return {name: tensors[name] for name in remove_tied_weights_from_state_dict(shells, model)}


def saved_tensors(
    model: PreTrainedModel, names: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], original_format: bool
) -> list[SavedTensor]:
    """The folder's keys in transformers' order, from global shapes alone: the same on every mesh."""
    state = {name: _symbol(name, value.shape, dtypes[name]) for name, value in names.items()}
    with _computed_keys() as computed_of:
        reverted = revert_weight_conversion(model, dict(state)) if original_format else state
    return [
        SavedTensor(key, value.shape, value.dtype, tuple(value.pieces), computed_of.get(id(value), frozenset()))
        for key, value in reverted.items()
    ]


def compute_keys(model: PreTrainedModel, names: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The real tensors of all keys that consist of `whole` alone; `whole` are tensors of the model by name."""
    state = {name: whole.get(name, _symbol(name, value.shape, value.dtype)) for name, value in names.items()}
    with _computed_keys():
        reverted = revert_weight_conversion(model, state)
    return {key: value.contiguous() for key, value in reverted.items() if not isinstance(value, SymbolicTensor)}


def _symbol(name: str, shape: torch.Size, dtype: torch.dtype) -> SymbolicTensor:
    origin = (0,) * len(shape)
    block = Block(name, Path(), 0, dtype, shape, origin, Stamp(0, 0, 0))
    pieces = [Piece(origin, tuple(shape), block, 0, row_major(shape))] if shape.numel() else []
    return SymbolicTensor(shape, dtype, pieces)


@contextmanager
def _computed_keys() -> Iterator[dict[int, frozenset[str]]]:
    """While active, operators that symbolic tensors cannot express give tensors without pieces; yields what those
    are computed of, by `id`."""
    mode = _Computing()
    with mode:
        yield mode.computed_of


class _Computing(TorchDispatchMode):
    """Runs what is inexpressible on meta tensors, and remembers the names that its results depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.computed_of: dict[int, frozenset[str]] = {}
        self.alive: list[SymbolicTensor] = []  # ids stay unique

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        symbols = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, SymbolicTensor)]
        if not any(id(symbol) in self.computed_of for symbol in symbols):
            try:
                return func(*args, **kwargs)
            except Inexpressible:
                pass
        names = frozenset().union(*map(self._names, symbols))
        results = func(*pytree.tree_map(_shell, args), **pytree.tree_map(_shell, kwargs))
        return pytree.tree_map(lambda result: self._computed(result, names), results)

    def _names(self, symbol: SymbolicTensor) -> frozenset[str]:
        return self.computed_of.get(id(symbol), frozenset(piece.block.key for piece in symbol.pieces))

    def _computed(self, result: Any, names: frozenset[str]) -> Any:
        if not isinstance(result, Tensor):
            return result
        symbol = SymbolicTensor(result.shape, result.dtype, ())
        self.alive.append(symbol)
        self.computed_of[id(symbol)] = names
        return symbol


def _shell(value: Any) -> Any:
    """A meta tensor like a symbolic or a real one."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value
