"""The table of rules: what is known of an operator's value, from what is known of its operands.

`I` the same on all ranks; `R` the same, its gradient a sum over the ranks; `S(d)` a shard on dim d, `S(d) x 2` one of
two parts that are each sharded by themselves; `P` a partial sum. Each row has an example that a test runs: `code` on
tensors of which `given` says what they are, by name, gives `gives`; `refused` is code that the same rule refuses.
Tensors of examples are x and y (4, 8, 8), w (8, 8), b (8), ids (4, 8) of integers; rank is this rank's index.

Operators of which no operand is a shard or a partial sum need no rule: all ranks do the same with the same values. For
one that the table does not have, `otherwise` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ndcompile.proof import contractions, layouts, moves, pointwise, reductions
from ndcompile.proof.fact import EXCHANGED, Fact, NotProven
from ndcompile.proof.own_functions import elementwise_function
from ndcompile.proof.use import Use

Rule = Callable[[Use], Fact]


@dataclass(frozen=True)
class Row:
    """operators: names without namespace. sizes: whether its numbers are sizes or places, which shapes already show;
    other numbers must be those of the code without tp."""

    operators: str
    rule: Rule
    says: str
    given: str
    code: str
    gives: str
    refused: str = ""
    sizes: bool = False


ROWS = (
    Row(
        "to clone contiguous detach alias neg type_as lift_fresh_copy _to_copy dropout_eval real imag conj",
        pointwise.same_value, "a copy is what it was", "x=P", "-x.clone()", "P",
    ),
    Row(
        "add sub add_ sub_ rsub", pointwise.added,
        "partial sums add up; nothing whole is added to one", "x=P y=P", "x + y", "P", refused="x + b",
    ),
    Row(
        "mul mul_ div div_", pointwise.multiplied,
        "a partial sum times what is the same everywhere is partial", "x=P b=R", "x * b", "P", refused="x * x",
    ),
    Row(
        "where", pointwise.chosen,
        "a partial sum or zero", "x=P b=I", "torch.where(b > 0, x, 0.0)", "P", refused="torch.where(b > 0, x, 1.0)",
    ),
    Row(
        "masked_fill masked_fill_", pointwise.filled,
        "a partial sum may be zeroed", "x=P b=I", "x.masked_fill(b > 0, 0.0)", "P",
        refused="x.masked_fill(b > 0, 1.0)",
    ),
    Row(
        "zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty zero_",
        pointwise.fresh,
        "of one number every part is alike", "x=S(1)", "x + torch.zeros_like(x)", "S(1)", sizes=True,
    ),
    Row("copy_", pointwise.copied, "the value of the source", "x=S(1)", "torch.empty_like(x).copy_(x)", "S(1)"),
    Row(
        "dropout native_dropout", pointwise.dropped_out,
        "what varies draws from the rank's own stream, any other from the shared one", "x=S(2)",
        "drop(x, seeds, 1)", "S(2)", refused="drop(x, seeds, 0)",
    ),
    Row(
        "sum", reductions.summed,
        "over the sharded dim partial, else the dim moves", "x=S(2)", "x.sum(2)", "P",
    ),
    Row(
        "mean", reductions.averaged,
        "over the sharded dim it is reduced first", "x=S(2)", "x.mean(1)", "S(1)", refused="x.mean(2)",
    ),
    Row(
        "softmax _softmax log_softmax _log_softmax logsumexp cumsum cumprod logcumsumexp topk sort argsort argmax "
        "argmin amax amin median prod norm linalg_vector_norm std var var_mean std_mean glu flip roll max min all any "
        "unfold count_nonzero diff cummax",
        reductions.read_along,
        "what reads along a dim needs it whole", "x=S(1)", "x.softmax(-1)", "S(1)", refused="x.softmax(1)",
    ),
    Row(
        "layer_norm native_layer_norm rms_norm _fused_rms_norm", reductions.normalized,
        "a norm over the last dims needs them whole", "x=S(1)", "F.layer_norm(x, (8,))", "S(1)",
        refused="F.rms_norm(x.transpose(1, 2), (x.shape[1],))",
    ),
    Row(
        "unbind", reductions.unbound, "the dim goes", "x=S(2)", "x.unbind(1)[0]", "S(1)", refused="x.unbind(2)[0]",
    ),
    Row(
        "cross_entropy_loss nll_loss_nd nll_loss nll_loss_forward", reductions.own_loss,
        "a loss needs all classes and all tokens", "x=I ids=I", "F.cross_entropy(x, ids)", "I",
    ),
    Row(
        "linear", contractions.linear,
        "over a sharded dim partial; a bias is not added to that", "x=S(2) w=S(1)", "F.linear(x, w)", "P",
        refused="F.linear(x, w, b)",
    ),
    Row(
        "matmul bmm mm mv dot", contractions.matmul,
        "over a sharded dim partial, batch and outer dims stay", "x=S(2) w=S(0)", "x @ w", "P", refused="(x @ w) @ x",
    ),
    Row(
        "addmm baddbmm", contractions.added_matmul,
        "a product and a bias", "y=R w=S(1) b=S(0)", "torch.addmm(b, y[0], w)", "S(1)",
    ),
    Row("einsum", contractions.einsum, "by its letters", "x=S(2) w=S(1)", "torch.einsum('bsk,nk->bsn', x, w)", "P"),
    Row(
        "_grouped_mm grouped_mm_fallback", contractions.grouped_matmul,
        "rows times their expert's matrix", "x=I", "x * 1", "I",
    ),
    Row(
        "scaled_dot_product_attention attention_with_dropout", contractions.attention,
        "heads and batch are apart", "x=S(0) y=S(0)",
        "F.scaled_dot_product_attention(x.unsqueeze(1), y.unsqueeze(1), y.unsqueeze(1))", "S(0)",
        refused="F.scaled_dot_product_attention(x.transpose(0, 1), y.transpose(0, 1), y.transpose(0, 1))",
    ),
    Row(
        "conv1d convolution conv2d", contractions.convolution,
        "channels each by itself", "x=S(1) w=S(0)",
        "F.conv1d(x, w[:, None, :3], groups=x.shape[1])", "S(1)", sizes=True,
    ),
    Row(
        "view reshape _unsafe_view flatten unflatten view_as reshape_as", layouts.viewed,
        "a shard stays the same elements in the same order", "x=S(1)", "x.flatten(1, 2)", "S(1)",
        refused="x.reshape(4, 8, -1)", sizes=True,
    ),
    Row(
        "expand expand_as broadcast_to repeat", layouts.expanded,
        "copies of one element may be shared out", "b=R x=S(1)", "b[None, None].expand(4, x.shape[1], 8)", "S(1)",
        refused="b[None].expand(x.shape[1], 8).reshape(-1)[: 8 * x.shape[1]].sum() * x", sizes=True,
    ),
    Row(
        "repeat_interleave", layouts.interleaved,
        "copies stand beside each other", "x=S(1)", "x.repeat_interleave(2, 1)", "S(1)", sizes=True,
    ),
    Row(
        "transpose swapaxes swapdims t permute unsqueeze squeeze numpy_T mT", layouts.permuted,
        "the dim moves", "x=S(1)", "x.transpose(0, 1).unsqueeze(0)", "S(1)",
    ),
    Row(
        "cat stack concat", layouts.concatenated,
        "shards on another dim, or equal ones that become parts", "x=S(1) y=S(1)", "torch.cat([x, y], 1)", "S(1) x 2",
        refused="torch.cat([x, y[:, :, :1].sum(1, keepdim=True).expand(4, x.shape[1], 8)], 1)",
    ),
    Row(
        "chunk split split_with_sizes narrow", layouts.taken_apart,
        "along a whole dim, or between parts", "x=S(1) x 2", "x.chunk(2, 1)[1]", "S(1)", refused="x.chunk(4, 1)[0]",
        sizes=True,
    ),
    Row(
        "slice", layouts.stepped,
        "along a whole dim, or every other element", "x=S(1)", "x[:, ::2]", "S(1)", refused="x[:, :2]", sizes=True,
    ),
    Row(
        "gather index_select select take_along_dim", layouts.gathered,
        "along a whole dim", "x=S(1)", "x.select(2, 0)", "S(1)", refused="x.select(1, 0)",
    ),
    Row(
        "index", layouts.indexed,
        "dims that are not indexed", "x=S(2) ids=I", "x[ids[0]]", "S(2)", refused="x[:, :, ids[0] * 0]",
    ),
    Row(
        "index_add index_add_ index_put index_put_ scatter scatter_ scatter_add scatter_add_ index_copy index_copy_",
        layouts.scattered,
        "a partial sum into zeros", "x=P ids=I", "torch.zeros_like(x).index_add(0, ids[:, 0], x)", "P",
        refused="torch.ones_like(x).index_add(0, ids[:, 0], x)",
    ),
    Row(
        "constant_pad_nd pad", layouts.padded,
        "not along the sharded dim", "x=S(1)", "F.pad(x, (1, 0))", "S(1)", refused="F.pad(x, (0, 0, 1, 0))", sizes=True,
    ),
    Row(
        "tril triu", layouts.triangular, "positions of whole dims", "x=S(0)", "x.tril()", "S(0)",
        refused="x.transpose(0, 1).tril()",
    ),
    Row(
        "view_as_complex view_as_real", layouts.complex_parts,
        "two parts beside each other", "x=S(0)",
        "torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))))", "S(0)",
    ),
    Row(
        "embedding", moves.looked_up,
        "columns are apart, rows need the rank's own index", "w=S(1) ids=I", "F.embedding(ids, w)", "S(2)",
    ),
    Row(
        "unshard average_gradient divide_gradient hold_gradient to_device", pointwise.same_value,
        "what data ranks do to a parameter is nothing to tp", "w=S(1) x=S(2)", "F.linear(x, average(w))", "P",
    ),
    Row(
        "vocabulary_loss", reductions.own_loss,
        "of rows on shards each rank sums the losses of its own labels", "x=R w=S(0) ids=I rank=I",
        "loss(x, w, ids, rank)", "P", refused="loss(x, w, ids, None)",
    ),
    Row(
        "redistribute", moves.moved,
        "takes what it says, and gives what it says", "x=S(1)", "move(x, 'S(1)', 'I')", "I",
        refused="move(x, 'P', 'I')",
    ),
)  # fmt: skip

RULES: Mapping[str, Row] = {name: row for row in ROWS for name in row.operators.split()}


def otherwise(use: Use) -> Fact:
    """For operators that the table does not have: those that torch tags as pointwise are, and a model's own autograd
    Function that consists of such. Refused is the rest."""
    target = use.node.target
    if torch.Tag.pointwise in getattr(target, "tags", ()) or elementwise_function(use):
        return pointwise.pointwise(use)
    if not use.of_kind("S", "P", EXCHANGED):
        return Fact("I")
    if use.of_kind(EXCHANGED):
        return Fact(EXCHANGED)
    raise NotProven(
        f"there is no rule for {target} on {', '.join(sorted({str(use.fact(o)) for o in use.of_kind('S', 'P')}))}",
        "Gather its operands before it, or add a row to ndcompile/proof/rules.py.",
    )
