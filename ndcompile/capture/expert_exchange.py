"""The experts of a MoE layer in capture: how tokens reach the rank that holds their expert, and come back.

Each exchange is one function around the experts' own forward, which runs on this rank's experts with local indices
(gate, biases, activations and norms are the model's). `hidden` is (tokens, features), `index` and `weights` (tokens,
top_k) from the router. What they emit is `redistribute` and `all_to_all` nodes with plain tensor code between.

The ranks of an expert group are ep = tp x ep_rest: those along tp share a batch, those along ep_rest have their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ndcompile.capture.boundaries import Boundary, Forward
from ndcompile.operators.redistribute import all_to_all
from ndcompile.operators.routing_checks import checked_splits, require
from ndcompile.plans.expert_plan import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, CAPACITY, ExpertPlan

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""hidden (rows, features), local index (rows, k), weights (rows, k) -> (rows, features)."""


@dataclass(frozen=True)
class Group:
    """The experts of a layer, and the axes of the ranks that share them; an axis is None where its size is 1.

    dropped: collects, per call, how many routed tokens found no room.
    """

    plan: ExpertPlan
    ep: Boundary
    tp: Boundary | None
    rest: Boundary | None
    dropped: dict[str, Tensor]

    def split(self, *tensors: Tensor) -> list[Tensor]:
        """This rank's part of the tokens that the tp ranks share; the last parts are padded with zeros."""
        return list(tensors) if self.tp is None else [self.tp.move(x, ("I", "S(0)"), x.shape[0]) for x in tensors]

    def join(self, x: Tensor, tokens: int) -> Tensor:
        """The inverse of `split`."""
        return x if self.tp is None else self.tp.move(x, ("S(0)", "I"), tokens)

    def position(self, index: Tensor) -> Tensor:
        """Expert index -> number of its slot in the order of the group's ranks."""
        if not self.ep.axis.by_rank or self.tp is None or self.rest is None:
            return index
        rank, slot = index // self.plan.local, index % self.plan.local
        rest = self.rest.axis.size
        return ((rank % rest) * self.tp.axis.size + rank // rest) * self.plan.local + slot


def install_exchanges(
    shadow: nn.Module, plans: tuple[ExpertPlan, ...], axes: Mapping[str, Boundary], dropped: dict[str, Tensor]
) -> None:
    """Wrap the forward of every experts module of `shadow`, which from now on holds this rank's experts only."""
    for plan in plans:
        module: Any = shadow.get_submodule(plan.fqn)
        group = Group(plan, axes["ep"], axes.get("tp"), axes.get("ep_rest"), dropped)
        module.num_experts = plan.local
        module._is_expert_parallel = plan.exchange != ALL_TO_ALL  # indices of other ranks' experts are masked
        module.forward = _exchanged(module.forward, EXCHANGE[plan.exchange], group)


def _exchanged(forward: Forward, exchange: Callable[..., Tensor], group: Group) -> Forward:
    @functools.wraps(forward)
    def local(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        def experts(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            return forward(hidden, index, weights, *args, **kwargs)

        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        output = exchange(experts, rows, top_k_index, top_k_weights, group)
        return output.to(hidden_states.dtype).reshape(hidden_states.shape)

    return local


def exchange_rows(experts: Experts, hidden: Tensor, index: Tensor, weights: Tensor, group: Group) -> Tensor:
    """All-to-all: each (token, expert) pair goes to the expert's rank and its result comes back.

    The numbers of rows depend on the data. Ranks tell each other in one small exchange, and the host reads them once.
    """
    plan, tokens, top_k = group.plan, hidden.shape[0], index.shape[1]
    hidden, index, weights = group.split(hidden, index, weights)
    slots, order = torch.sort(_slots(index, group), stable=True)
    send = _rows_per_slot(slots, plan.count).view(plan.ep, plan.local)
    lost = slots.shape[0] - send.sum()  # of indices that name no expert; every rank learns of it
    told = torch.cat([send, lost.expand(plan.ep, 1)], 1).reshape(-1)
    each = [plan.local + 1] * plan.ep
    received = all_to_all(told, each, each, group.ep.axis.group).view(plan.ep, plan.local + 1)
    receive = received[:, :-1]
    splits = torch.stack([send.sum(1), receive.sum(1), received[:, -1]]).to("cpu")
    sizes = checked_splits(splits, plan.fqn, plan.count).tolist()
    outgoing, incoming = _closed(sizes[0], slots.shape[0]), _closed(sizes[1], sizes[1][-1])

    rows = all_to_all(hidden[order // top_k], incoming, outgoing, group.ep.axis.group)
    local = torch.arange(plan.local, device=hidden.device).repeat(plan.ep)
    local = local.repeat_interleave(receive.reshape(-1), output_size=sizes[1][-1])
    rows = experts(rows, local.unsqueeze(1), rows.new_ones(()).expand(rows.shape[0], 1))
    rows = all_to_all(rows, outgoing, incoming, group.ep.axis.group)
    return group.join(_combine(rows[_inverse(order)], weights), tokens)


def mask_others(experts: Experts, hidden: Tensor, index: Tensor, weights: Tensor, group: Group) -> Tensor:
    """Every rank of the group runs its experts on the tokens of all, and the partial outputs are summed.

    Along tp the tokens are there already: the sum is an all-reduce. Along ep_rest they are gathered, and the sum is a
    reduce-scatter. Shapes are static and the host reads nothing.
    """
    plan = group.plan
    known = ((index >= 0) & (index < plan.count)).all()
    hidden = require(hidden, known, f"{plan.fqn!r}: routing indices outside the {plan.count} experts.")
    if group.tp is not None:
        hidden, weights = group.tp.move(hidden, ("I", "R")), group.tp.move(weights, ("I", "R"))
    if group.rest is not None:
        hidden = _same_length(hidden, group)
        hidden, index, weights = (group.rest.move(x, ("S(0)", "R")) for x in (hidden, index, weights))
    assert group.ep.coordinate is not None
    local = index - group.ep.coordinate * plan.local
    mine = (local >= 0) & (local < plan.local)
    output = experts(hidden, torch.where(mine, local, plan.local), torch.where(mine, weights, 0.0))
    if group.rest is not None:
        output = group.rest.move(output, ("P", "S(0)"))
    return output if group.tp is None else group.tp.move(output, ("P", "I"))


def exchange_with_capacity(experts: Experts, hidden: Tensor, index: Tensor, weights: Tensor, group: Group) -> Tensor:
    """All-to-all of equal parts: a rank sends every other the same number of rows, `capacity` times the even share.

    What does not fit is dropped and counted; an infinite capacity is the worst case, in which all fits. Shapes are
    static and the host reads nothing.
    """
    plan, tokens, top_k = group.plan, hidden.shape[0], index.shape[1]
    known = ((index >= 0) & (index < plan.count)).all()
    hidden = require(hidden, known, f"{plan.fqn!r}: routing indices outside the {plan.count} experts.")
    hidden = _same_length(hidden, group)
    hidden, index, weights = group.split(hidden, plan.count - index, weights)
    index = plan.count - index  # what was padded with 0 names no expert now, and takes no room
    pairs = index.numel()
    room = _room(hidden.shape[0], top_k, plan)

    slots, order = torch.sort(_slots(index, group), stable=True)
    slots = slots.to(torch.int64)
    target = slots // plan.local
    first = torch.searchsorted(slots, torch.arange(plan.ep, device=slots.device) * plan.local)
    place = torch.arange(pairs, device=slots.device) - first[target.clamp(max=plan.ep - 1)]
    fits = (target < plan.ep) & (place < room)
    dropped = ((target < plan.ep) & ~fits).sum()
    group.dropped[plan.fqn] = dropped if group.tp is None else group.tp.move(dropped, ("P", "I"))

    places = plan.ep * room
    seat = torch.where(fits, target * room + place, places)
    send = hidden.new_zeros(places + 1, hidden.shape[1]).index_put((seat,), hidden[order // top_k])[:-1]
    expert = torch.full_like(slots[:1], plan.local).expand(places + 1).index_put((seat,), slots % plan.local)[:-1]
    each = [room] * plan.ep
    rows = all_to_all(send, each, each, group.ep.axis.group)
    local = all_to_all(expert, each, each, group.ep.axis.group).unsqueeze(1)
    rows = experts(rows, local, (local < plan.local).to(rows.dtype))
    rows = all_to_all(rows, each, each, group.ep.axis.group)
    rows = torch.where(fits.unsqueeze(1), rows[seat.clamp(max=places - 1)], 0.0)
    return group.join(_combine(rows[_inverse(order)], weights), tokens)


EXCHANGE: dict[str, Callable[[Experts, Tensor, Tensor, Tensor, Group], Tensor]] = {
    ALL_TO_ALL: exchange_rows,
    ALL_GATHER: mask_others,
    ALL_REDUCE: mask_others,
    CAPACITY: exchange_with_capacity,
}


def _slots(index: Tensor, group: Group) -> Tensor:
    """The slot of each (token, expert) pair; that behind the last for an index that names no expert. Sorting takes as
    many passes as the numbers have bytes, hence int16 where that is enough."""
    count = group.plan.count
    slot = torch.where((index >= 0) & (index < count), group.position(index), count)
    return slot.reshape(-1).to(torch.int16 if count < 2**15 else torch.int32)


def _rows_per_slot(slots: Tensor, count: int) -> Tensor:
    """How often each of `count` numbers occurs in the sorted `slots`."""
    edges = torch.searchsorted(slots, torch.arange(count + 1, device=slots.device, dtype=slots.dtype))
    return edges[1:] - edges[:-1]


def _closed(sizes: list[Any], total: Any) -> list[Any]:
    """`sizes` with the last one as what the others leave of `total`. So their sum is one symbol instead of many, and
    what symbolic shapes do with it does not grow with the number of ranks."""
    return [*sizes[:-1], total - sum(sizes[:-1])]


def _inverse(order: Tensor) -> Tensor:
    """The permutation that undoes `order`. It is written, as sorting takes a dozen kernels."""
    return torch.empty_like(order).index_put((order,), torch.arange(order.shape[0], device=order.device))


def _combine(rows: Tensor, weights: Tensor) -> Tensor:
    """Sum the (tokens x top_k) rows of each token with the router's weights."""
    return (rows.view(*weights.shape, rows.shape[1]) * weights.unsqueeze(2)).sum(1)


def _room(tokens: Any, top_k: int, plan: ExpertPlan) -> Any:
    """Rows that a rank may send to another: at most all of its tokens, as often as they can meet experts there."""
    worst = tokens * min(top_k, plan.local)
    if plan.capacity is None or plan.capacity == float("inf"):
        return worst
    hundredths = max(round(plan.capacity * 100), 1)
    return torch.sym_min(worst, (tokens * top_k * hundredths + 100 * plan.ep - 1) // (100 * plan.ep))


def _same_length(hidden: Tensor, group: Group) -> Tensor:
    """Exchanges in fixed shapes need the same number of tokens on all ranks of the group."""
    if group.rest is None:
        return hidden
    own = torch.full((1,), hidden.shape[0], dtype=torch.int64, device=hidden.device)
    same = (group.rest.move(own, ("S(0)", "R")) == own).all()
    return require(
        hidden,
        same,
        f"{group.plan.fqn!r}: ranks of an expert group have different numbers of tokens, which the exchange "
        f"{group.plan.exchange!r} cannot serve. Use ep_implementation='all_to_all', or batches of one size.",
    )
