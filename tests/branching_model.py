"""A model with a layer whose code branches on data, as the experts of some models do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TP_PLAN = {
    "layers.*.experts.gate_up": "packed_colwise",
    "layers.*.experts.down": "rowwise",
    "head": "rowwise_split_input",
}


class Experts(nn.Module):
    """Loops over those that a token was routed to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(3, 8, 6))
        self.down = nn.Parameter(torch.randn(3, 6, 4))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor, index: Tensor, *, weights: tuple[Tensor, Tensor], bias: float) -> dict[str, Tensor]:
        y = torch.zeros_like(x)
        for expert in torch.bincount(index, minlength=3).nonzero():
            number = int(expert)
            (rows,) = torch.where(index == number)
            gate, up = F.linear(x[rows], self.gate_up[number]).chunk(2, -1)
            y = y.index_add(0, rows, F.linear(F.silu(gate) * up, self.down[number]) * weights[0][rows])
        return {"y": y * self.scale + bias, "index": index}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 3), Experts()

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).max(-1, keepdim=True)
        return x + self.experts(x, index[:, 0], weights=(weights, weights), bias=0.25)["y"]


class Branching(nn.Module):
    """Returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList([Layer(), Layer()]), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


class OnShards(nn.Module):
    """What branches on data stands between a colwise and a rowwise linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.between, self.down = nn.Linear(6, 8), Choosing(), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x))).square().mean()


class Choosing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def rows(number: int = 5, seed: int = 1) -> Tensor:
    return torch.randn(number, 6, generator=torch.Generator().manual_seed(seed))
