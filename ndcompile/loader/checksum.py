"""Checksums that add up: that of a tensor is the sum of those of its slices, whatever the slices are.

    sum over elements of  bits * weight_0[i] * weight_1[j] * ...  modulo 2^64

where i, j, ... are global indices and the weights are odd numbers that look random. An element that is wrong, or right
but in another place, changes the sum. Each rank adds up its slices in memory, and its share of the checkpoint, which it
reads again in other pieces than the load did; only the sums meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ndcompile.loader.assignment import Assignment, Source
from ndcompile.loader.catalog import CheckpointError, Entry
from ndcompile.loader.conversion import convert_group
from ndcompile.loader.layouts import copies
from ndcompile.loader.pieces import Piece, pieces_of
from ndcompile.loader.reading import execute, plan_reads
from ndcompile.loader.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ndcompile.verify.agreement import Agreement

MODULUS = 1 << 64
_CHUNK = 1 << 20
"""Elements that are summed at once: they take eight bytes each meanwhile."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Peers:
    """The ranks that load together. `exchange(name, value)` gives every rank's value (JSON), in rank order."""

    exchange: Callable[[str, Any], list[Any]]
    rank: int = 0
    world: int = 1

    @classmethod
    def of(cls, agreement: Agreement, step: str) -> Peers:
        """All ranks of `agreement`, for exchanges within its `step`."""
        rank, world = (0, 1) if agreement.alone else (agreement.rank, agreement.world)
        return cls(lambda name, value: agreement.exchange(f"{step}/{name}", value), rank, world)


def checksum(value: torch.Tensor, start: Sequence[int]) -> int:
    """Of the rectangle `value`, of any dtype, which begins at the global index `start`."""
    if value.numel() > _CHUNK:
        dim = next(dim for dim, size in enumerate(value.shape) if size > 1)
        half = value.shape[dim] // 2
        behind = [*start[:dim], start[dim] + half, *start[dim + 1 :]]
        first, second = value.narrow(dim, 0, half), value.narrow(dim, half, value.shape[dim] - half)
        return (checksum(first, start) + checksum(second, behind)) % MODULUS
    total = value.detach().contiguous().view(_BITS[value.element_size()]).to(torch.int64)
    for dim in reversed(range(total.ndim)):
        total = (total * _weights(dim, start[dim], total.shape[dim], total.device)).sum(-1)
    return int(total) % MODULUS


def verify_checksums(model: PreTrainedModel, assignment: Assignment, catalog: Mapping[str, Entry], peers: Peers) -> int:
    """Compare what all ranks hold with what the files hold; returns how many tensors were compared.

    Three short exchanges at most. Raises CheckpointError on every rank, naming the tensors that differ and the ranks
    whose memory is not what the files say.
    """
    targets = [source.target for source in assignment.sources]
    targets += [target for group in assignment.whole for target in group.filled.values()]
    held = [_held(target) for target in targets]
    stored = _stored(model, assignment, catalog, peers)
    differences = [
        (mine - copies(target.placements, target.mesh_shape) * stored.get(target.fqn, 0)) % MODULUS
        for target, mine in zip(targets, held, strict=True)
    ]
    # One number a rank, if all is well: odd weights keep a single difference from vanishing.
    weights = _weights(0, 0, len(targets), torch.device("cpu")).tolist()
    weighted = sum(weight * difference for weight, difference in zip(weights, differences, strict=True))
    if sum(peers.exchange("hash", weighted % MODULUS)) % MODULUS == 0:
        return len(targets)
    every = peers.exchange("hash/tensors", differences)
    wrong = [target for target, *sums in zip(targets, *every, strict=True) if sum(sums) % MODULUS]
    suspects = peers.exchange("hash/ranks", [_differs(target, assignment) for target in wrong])
    raise CheckpointError(
        f"the checksums of {len(wrong)} of {len(targets)} tensors are not those of the files:\n  "
        + "\n  ".join(_blame(target, ranks) for target, ranks in zip(wrong, zip(*suspects, strict=True), strict=True))
        + "\nDo not train with this model. Load again; if it happens again, check memory and file system."
    )


def _held(target: Target) -> int:
    """Checksum of this rank's slices."""
    return sum(checksum(view, offset) for offset, view in target.rectangles()) % MODULUS


def _stored(
    model: PreTrainedModel, assignment: Assignment, catalog: Mapping[str, Entry], peers: Peers
) -> dict[str, int]:
    """Checksums of this rank's share of the checkpoint, by FQN, after conversion and cast."""
    sums: dict[str, int] = {}
    turn = 0
    for source in assignment.sources:
        for piece in source.pieces:
            for chunk in _chunks(piece):
                turn += 1
                if turn % peers.world == peers.rank:
                    value = _read(chunk).to(source.target.tensor.dtype)
                    fqn = source.target.fqn
                    sums[fqn] = (sums.get(fqn, 0) + checksum(value, chunk.start)) % MODULUS
    for number, whole in enumerate(assignment.whole):
        if number % peers.world == peers.rank:
            made = convert_group(
                whole.group,
                model,
                lambda key, dtype=whole.dtype: _read_all(catalog[key]).to(dtype),  # type: ignore[misc]
            )
            for name, target in whole.filled.items():
                value = made[name].to(target.tensor.dtype)
                sums[target.fqn] = checksum(value, [0] * value.ndim)
    return sums


def _chunks(piece: Piece) -> Iterator[Piece]:
    """`piece` in parts of at most `4 * _CHUNK` elements, cut in its outermost dims."""
    if torch.Size(piece.size).numel() <= 4 * _CHUNK:
        yield piece
        return
    dim = next(dim for dim, size in enumerate(piece.size) if size > 1)
    half = piece.size[dim] // 2
    for begin, length in ((0, half), (half, piece.size[dim] - half)):
        start, size = list(piece.start), list(piece.size)
        start[dim], size[dim] = start[dim] + begin, length
        offset = piece.offset + begin * piece.strides[dim]
        yield from _chunks(Piece(tuple(start), tuple(size), piece.block, offset, piece.strides))


def _read(piece: Piece) -> torch.Tensor:
    value = torch.empty(piece.size, dtype=piece.block.dtype, device="cpu")
    execute(plan_reads([piece], [(piece.start, value)]))
    return value


def _read_all(entry: Entry) -> torch.Tensor:
    value = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    execute(plan_reads(pieces_of(entry), [((0,) * value.ndim, value)]))
    return value


def _differs(target: Target, assignment: Assignment) -> bool | None:
    """Whether this rank's slices are not what the files give it now; None where they are computed."""
    source: Source | None = next((s for s in assignment.sources if s.target is target), None)
    if source is None:
        return None
    again = torch.empty(target.tensor.shape, dtype=target.tensor.dtype, device="cpu")
    execute(plan_reads(source.pieces, target.rectangles(again)))
    # As bits: a NaN is equal to itself here.
    return not torch.equal(_as_bits(again), _as_bits(target.tensor.detach().cpu()))


def _as_bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(_BITS[value.element_size()])


def _blame(target: Target, answers: Sequence[bool | None]) -> str:
    ranks = [rank for rank, differs in enumerate(answers) if differs]
    if ranks:
        return f"{target.fqn}: the memory of ranks {ranks} is not what the files hold"
    return (
        f"{target.fqn}: every rank holds what it reads, so the ranks read different files, or their slices do not tile"
    )


def _weights(dim: int, start: int, length: int, device: torch.device) -> torch.Tensor:
    """Odd 64-bit numbers of the indices of a dim: the finalizer of splitmix64."""
    x = torch.arange(start + 1, start + length + 1, dtype=torch.int64, device=device)
    x = x * _signed(0x9E3779B97F4A7C15) + _signed((dim + 1) * 0xD1B54A32D192ED03)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shift(x, 31)) | 1


def _shift(x: torch.Tensor, places: int) -> torch.Tensor:
    """Right, with zeros from the left: torch's own keeps the sign."""
    return (x >> places) & ((1 << (64 - places)) - 1)


def _signed(number: int) -> int:
    number %= MODULUS
    return number - MODULUS if number >= MODULUS // 2 else number
