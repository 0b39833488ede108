"""Small graphs and what the proof says of them: the value's layout, or that it is refused."""

import proof_cases
import pytest

RIGHT = {
    "a gated product": ("x=S(2) y=S(2)", "F.silu(x) * y", "S(2)"),
    "columns of a projection": ("x=R w=S(0)", "F.linear(x, w)", "S(2)"),
    "rows of a projection": ("x=S(2) w=S(1)", "move(F.linear(x, w), 'P', 'I')", "I"),
    "a transposed matrix": ("w=S(0)", "w.T", "S(1)"),
    "a batch of transposed matrices": ("x=S(2)", "x.mT", "S(1)"),
    "zeros added to heads of every sequence": (
        "x=S(1)",
        "(lambda h: torch.baddbmm(torch.zeros(h.shape[0], 8, 8), h, h))(x.unflatten(2, (8, 1)).expand(-1, -1, -1, 8)"
        ".reshape(-1, 8, 8)).unflatten(0, (4, -1))",
        "S(1)",
    ),
    "a bias of a convolution's channels": (
        "x=S(1) w=S(0) b=S(0)",
        "F.conv1d(x, w[:, None, :3], b, groups=x.shape[1])",
        "S(1)",
    ),
    "one head a rank, which needs no copy": (
        "x=S(1)",
        "x.unflatten(1, (-1, 4)).transpose(1, 2).contiguous() + 1",
        "S(2)",
    ),
    "heads behind positions": ("x=S(1)", "x.transpose(1, 2)", "S(2)"),
    "attention weights of own heads": ("x=S(1)", "x.softmax(-1)", "S(1)"),
    "the first keys of a cache": ("x=S(1)", "torch.cat([torch.tensor([]), x], 1)", "S(1)"),
    "a gathered shard": ("x=S(1)", "move(x, 'S(1)', 'I')", "I"),
    "a norm over whole heads": ("x=S(1)", "x * x.pow(2).mean(-1, keepdim=True).rsqrt()", "S(1)"),
    "a scale whose gradient is summed": ("x=S(1) b=R", "x * b", "S(1)"),
    "a sharded scale": ("x=S(2) b=S(0)", "x * b", "S(2)"),
    "a sum that is reduced": ("x=S(2)", "move(x.sum(-1), 'P', 'I')", "I"),
    "zeros and a shard": ("x=S(1)", "torch.zeros(4, x.shape[1], 8) + x", "S(1)"),
    "two partial sums": ("x=S(2) y=S(2) w=S(1)", "F.linear(x, w) + F.linear(y, w)", "P"),
    "heads merged and split": ("x=S(1)", "x.reshape(4, -1).unflatten(1, (-1, 8))", "S(1)"),
    "the smaller of two": ("x=S(1)", "torch.min(x, b.detach().sum())", "S(1)"),
    "a mean over the batch": ("x=S(1)", "x.mean(0)", "S(0)"),
    "a share of a constant 1/tp": ("x=R", "move(x / ranks, 'P', 'I')", "I"),
    "rows by the rank's index": (
        "w=S(0) ids=I rank=I",
        "(lambda row: (lambda inside: torch.where(inside.unsqueeze(-1), F.embedding(torch.where(inside, row, 0), w), "
        "0.0))((row >= 0) & (row < w.shape[0])))(ids - rank * w.shape[0])",
        "P",
    ),
    "rows by the rank's index, each normalized": (
        "w=S(0) ids=I rank=I",
        "(lambda row: (lambda inside: torch.where(inside.unsqueeze(-1), (lambda h: h * h.pow(2).mean(-1, keepdim=True)"
        ".rsqrt())(F.embedding(torch.where(inside, row, 0), w)), 0.0))((row >= 0) & (row < w.shape[0])))(ids - rank * "
        "w.shape[0])",
        "P",
    ),
}
WRONG = {
    "a bias added to a partial sum": ("x=S(2) w=S(1)", "F.linear(x, w) + b"),
    "a bias on every rank, summed": ("x=S(2) w=S(1)", "move(F.linear(x, w, b), 'P', 'I')"),
    "a gradient that nobody sums": ("x=I w=S(0)", "F.linear(x, w)"),
    "a write into what is a copy without tp": (
        "x=S(1)",
        "(lambda h: (h.transpose(1, 2).contiguous().mul_(2), h + 1)[1])(x.unflatten(1, (-1, 4)) * 1)",
    ),
    "a number added to a partial sum": ("x=S(2)", "move(x.sum(-1) + 1, 'P', 'I')"),
    "softmax of a partial sum": ("x=S(2)", "x.sum(-1).softmax(-1)"),
    "a partial sum clamped": ("x=S(2)", "x.sum(-1).clamp(min=0)"),
    "a partial sum compared": ("x=S(2)", "torch.where(x.sum(-1, keepdim=True) > 0, b, 0.0)"),
    "a ratio of partial sums": ("x=S(2) y=S(2)", "x.sum(-1) / y.sum(-1)"),
    "the exponential of a partial sum": ("x=S(2)", "x.sum(-1).exp()"),
    "the best of a sharded vocabulary": ("x=S(2)", "x.argmax(-1)"),
    "a sum of means": ("x=S(2)", "move(x.mean(-1), 'P', 'I')"),
    "cross entropy of a sharded vocabulary": ("x=S(2) ids=I", "F.cross_entropy(x.flatten(0, 1), ids.flatten())"),
    "a layer norm over a shard": ("x=S(2)", "F.layer_norm(x, x.shape[-1:])"),
    "a triangle of local positions": ("x=S(1)", "x * torch.ones(x.shape[1], 8).tril()"),
    "a product over heads": ("x=S(1)", "x.prod(1)"),
    "elements dealt out anew": ("x=S(1)", "x.reshape(4, 8, -1)"),
    "the variance": ("x=S(2)", "x.var(-1)"),
    "softmax over a sharded dim": ("x=S(2)", "x.softmax(-1)"),
    "a norm over all heads": ("x=S(1)", "x / x.flatten(1).norm(dim=-1)[:, None, None]"),
    "an unreduced scale": ("x=S(1)", "x * b"),
    "a reduction done twice": ("x=S(2)", "move(move(x.sum(-1), 'P', 'I'), 'P', 'I')"),
    "a gradient summed twice": ("x=I", "move(move(x, 'I', 'R'), 'I', 'R')"),
    "a reduced shard": ("x=S(2)", "move(x, 'P', 'I')"),
    "a shard gathered on another dim": ("x=S(2)", "move(x, 'S(1)', 'I')"),
    "ids in this rank's rows": ("w=S(0) ids=I", "F.embedding(ids, w)"),
    "rows by the rank's index, normalized over the batch": (
        "w=S(0) ids=I rank=I",
        "(lambda row: (lambda inside: torch.where(inside.unsqueeze(-1), (lambda h: h * h.pow(2).mean(0, keepdim=True)"
        ".rsqrt())(F.embedding(torch.where(inside, row, 0), w)), 0.0))((row >= 0) & (row < w.shape[0])))(ids - rank * "
        "w.shape[0])",
    ),
    "rows without a mask": ("w=S(0) ids=I rank=I", "F.embedding(ids - rank * w.shape[0], w)"),
    "expand into a sharded dim": ("x=S(1)", "b[None, None].expand(4, x.shape[1], 8) * x"),
    "every rank's first positions": ("x=S(1)", "x * move(b, 'I', 'R')[: x.shape[1], None]"),
    "positions of a local range": ("x=S(1)", "x * torch.arange(x.shape[1])[:, None]"),
    "a scale by the local width": ("x=S(1)", "x / x.shape[1]"),
    "a relu of a partial sum": ("x=S(2)", "x.sum(-1).relu()"),
    "a partial sum squared": ("x=S(2)", "x.sum(-1) * x.sum(-1)"),
    "a partial sum and a shard": ("x=S(2)", "x * x.sum(-1, keepdim=True)"),
    "halves of a plain shard": ("x=S(2)", "x.chunk(2, -1)[0]"),
    "cumsum over heads": ("x=S(1)", "x.cumsum(1)"),
    "the largest over heads": ("x=S(1)", "x - x.amax(1, keepdim=True)"),
    "the largest of all": ("x=S(1)", "x / x.abs().max()"),
    "heads in another order": ("x=S(1)", "x.flip(1)"),
    "heads rolled": ("x=S(1)", "x.roll(1, 1)"),
    "the first head": ("x=S(1)", "x + x[:, 0:1]"),
    "a head by number": ("x=S(1)", "x.select(1, 0)"),
    "the deviation": ("x=S(2)", "x / x.std(-1, keepdim=True)"),
    "logsumexp": ("x=S(1)", "x - x.logsumexp(1, keepdim=True)"),
    "top-k over heads": ("x=S(1)", "x.topk(1, dim=1)[0]"),
    "sorted heads": ("x=S(1)", "x.sort(1)[0]"),
    "padded heads": ("x=S(1)", "F.pad(x, (0, 0, 1, 0))"),
    "a block of the diagonal": ("x=S(1) y=S(1)", "x @ y.transpose(1, 2)"),
    "dims that do not correspond": ("w=S(0) x=S(1)", "x.transpose(0, 1) * x.shape[1]"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_graph_is_proven(name):
    given, code, expected = RIGHT[name]
    proof, found = proof_cases.proven(code, given)
    assert (found, proof_cases.reasons(proof)) == (expected, [])


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_graph_is_refused(name):
    given, code = WRONG[name]
    assert proof_cases.reasons(proof_cases.proven(code, given)[0])
