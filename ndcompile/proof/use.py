"""One node as the rules see it: its arguments, what is known of them, and which dim of its value tp cuts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from ndcompile.private.tracing import size_hint
from ndcompile.proof.fact import KEEP_WHOLE, Fact, NotProven
from ndcompile.verify.sharded_dims import argument

Twins = Mapping[fx.Node, fx.Node]
"""Node of the rank's graph -> the node of the same code without tp."""

NUMBER = Fact("I", uniform=True)


@dataclass(frozen=True)
class Use:
    """A node and what is known before it.

    ranks: size of tp. cut: dim of its value that is smaller on a rank; None where none is, and for a node that a pass
    made, which has no twin.
    """

    node: fx.Node
    facts: Mapping[fx.Node, Fact]
    twins: Twins
    ranks: int
    cut: int | None

    @property
    def paired(self) -> bool:
        return self.node in self.twins

    def argument(self, name: str) -> Any:
        """An argument by its name in the operator's schema; None where it has none."""
        return argument(self.node, name)

    def fact(self, source: Any) -> Fact:
        """What is known of an operand; numbers are the same everywhere."""
        return self.facts.get(source, NUMBER) if isinstance(source, fx.Node) else NUMBER

    @property
    def operands(self) -> list[fx.Node]:
        """The inputs that hold tensors, each once."""
        return [source for source in self.node.all_input_nodes if tensor_of(source) is not None]

    def of_kind(self, *kinds: str) -> list[fx.Node]:
        return [source for source in self.operands if self.fact(source).kind in kinds]

    def whole_shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape without tp, symbols as the numbers that stand for them."""
        if node in self.twins and (value := tensor_of(self.twins[node])) is not None:
            return tuple(map(size_hint, value.shape))
        known = self.fact(node)
        sizes = list(shape(node))
        if known.kind == "S":
            sizes[known.dim] *= self.ranks
        return tuple(sizes)


def tensor_of(node: fx.Node) -> Tensor | None:
    """The value of a node, or the first of several."""
    value = node.meta.get("val")
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return value if isinstance(value, Tensor) else None


def ndim(node: fx.Node) -> int:
    value = tensor_of(node)
    assert value is not None
    return value.ndim


def shape(node: fx.Node) -> tuple[int, ...]:
    """Of a rank's value, symbols as the numbers that stand for them."""
    value = tensor_of(node)
    assert value is not None
    return tuple(map(size_hint, value.shape))


def cut_dim(node: fx.Node, twin: fx.Node, ranks: int) -> int | None:
    """The dim that is smaller on a rank. Raises NotProven for two of them, and for sizes that no shard has."""
    own, whole = tensor_of(node), tensor_of(twin)
    if own is None or whole is None:
        return None
    if own.ndim != whole.ndim:
        raise NotProven(f"it has {own.ndim} dims on a rank and {whole.ndim} without tp", KEEP_WHOLE)
    sizes = enumerate(zip(own.shape, whole.shape, strict=True))
    found = [(dim, size, total) for dim, (size, total) in sizes if str(size) != str(total)]
    for dim, size, total in found:
        if size_hint(size) != -(-size_hint(total) // ranks):
            raise NotProven(
                f"dim {dim} has {size} elements on a rank and {total} without tp, which is no shard of 1/{ranks}",
                KEEP_WHOLE,
            )
    if len(found) > 1:
        raise NotProven(
            f"its dims {[dim for dim, *_ in found]} are all smaller on a rank, but one axis cuts one dim: each rank "
            "would hold a block of the diagonal",
            KEEP_WHOLE,
        )
    return found[0][0] if found else None
