"""An ordinary nn.Module, without transformers: attention and a gated MLP over named layers, and the user's plan."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TP_PLAN = {
    "embed": "embedding_rowwise",
    "layers.*.query": "colwise",
    "layers.*.key": "colwise",
    "layers.*.value": "colwise",
    "layers.*.out": "rowwise",
    "layers.*.gate_up": "packed_colwise",
    "layers.*.down": "rowwise",
    "head": "colwise_gather_output",
}
VOCABULARY, WIDTH, HEAD_DIM = 96, 32, 8


class Layer(nn.Module):
    """One block; `scale` multiplies the MLP's shards, without a rule of the plan."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate_up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        heads = [p(h).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for p in (self.query, self.key, self.value)]
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up * self.scale)


class PlainModel(nn.Module):
    """Returns a dict, as code without transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten())}


def build() -> PlainModel:
    """The same model at every call."""
    torch.manual_seed(0)
    return PlainModel()
