"""Small modules with the tp plan that each needs: one for every style of transformers' plans."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

HIDDEN, WIDTH, ROWS = 12, 20, 30


class UnitConfig(PretrainedConfig):
    model_type = "style_unit"

    def __init__(self, unit: str = "mlp", width: int = WIDTH, **kwargs):
        self.unit, self.width = unit, width
        super().__init__(**kwargs)


class UnitModel(PreTrainedModel):
    """A unit behind a replicated linear, so that the gradient that leaves the unit is checked too."""

    config_class = UnitConfig

    def __init__(self, config: UnitConfig):
        super().__init__(config)
        self.embed = nn.Embedding(ROWS, HIDDEN)
        self.before = nn.Linear(HIDDEN, HIDDEN)
        self.unit = UNITS[config.unit].module(config.width)
        self.post_init()

    def forward(self, input_ids: Tensor) -> Tensor:
        if isinstance(self.unit, nn.Embedding):
            return self.before(self.unit(input_ids))
        x = self.before(self.embed(input_ids))
        return x + self.unit(x)


class Mlp(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(HIDDEN, width)
        self.down = nn.Linear(width, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class PackedMlp(nn.Module):
    """Gate and up in one projection, split by chunk."""

    def __init__(self, width: int):
        super().__init__()
        self.gate_up = nn.Linear(HIDDEN, 2 * width)
        self.down = nn.Linear(width, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(torch.tanh(gate) * up)


class Packed3Mlp(nn.Module):
    """Three projections in one."""

    def __init__(self, width: int):
        super().__init__()
        self.three = nn.Linear(HIDDEN, 3 * width)
        self.down = nn.Linear(width, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, shift = self.three(x).chunk(3, dim=-1)
        return self.down(torch.tanh(gate) * up + shift)


class TransposedMlp(Mlp):
    def __init__(self, width: int):
        super().__init__(width)
        self.up, self.down = Conv1D(width, HIDDEN), Conv1D(HIDDEN, width)


class TransposedPackedMlp(PackedMlp):
    def __init__(self, width: int):
        super().__init__(width)
        self.gate_up, self.down = Conv1D(2 * width, HIDDEN), Conv1D(HIDDEN, width)


class TransposedPacked3Mlp(Packed3Mlp):
    def __init__(self, width: int):
        super().__init__(width)
        self.three, self.down = Conv1D(3 * width, HIDDEN), Conv1D(HIDDEN, width)


class PackedInput(nn.Module):
    """A projection whose input is two sharded halves side by side; the sum is its parent's."""

    def __init__(self, width: int):
        super().__init__()
        self.left = nn.Linear(HIDDEN, width)
        self.right = nn.Linear(HIDDEN, width)
        self.down = nn.Linear(2 * width, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.cat([torch.tanh(self.left(x)), torch.sin(self.right(x))], dim=-1))


class BareParameters(nn.Module):
    """Weights without a Linear around them, with a sharded scale of the activation."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Parameter(torch.randn(width, HIDDEN) / 3)
        self.scale = nn.Parameter(torch.randn(width))
        self.down = nn.Parameter(torch.randn(HIDDEN, width) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.up)) * self.scale, self.down)


class HeadNorm(nn.Module):
    """A norm over heads between two projections: its weight is replicated and meets each rank's heads only."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(HIDDEN, width)
        self.norm = nn.LayerNorm(width // 4)
        self.down = nn.Linear(width, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).unflatten(-1, (-1, self.norm.normalized_shape[0]))
        return self.down(self.norm(heads).flatten(-2))


class SharedKey(nn.Module):
    """A value that skips the sharded projection and is written beside its heads, as the rope part of MLA."""

    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self.compress = nn.Linear(HIDDEN, HIDDEN + 2)
        self.expand = nn.Linear(HIDDEN, width)
        self.down = nn.Linear(width // 5 * 7, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        latent, shared = self.compress(x).split([HIDDEN, 2], dim=-1)
        heads = self.expand(latent).unflatten(-1, (-1, 5))
        keys = heads.new_empty(*heads.shape[:-1], 7)
        keys[..., :5].copy_(heads)
        keys[..., 5:].copy_(shared.unsqueeze(-2).expand(-1, -1, heads.shape[-2], -1))
        return self.down(torch.tanh(keys).flatten(-2))


class Experts(nn.Module):
    """Two experts and an identity expert, each on all tokens."""

    def __init__(self, width: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 2 * width, HIDDEN) / 3)
        self.down_proj = nn.Parameter(torch.randn(2, HIDDEN, width) / 3)
        self.identity = nn.Identity()

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = self.identity(hidden) * weights[..., 2:]
        for expert in range(2):
            gate, up = F.linear(hidden, self.gate_up_proj[expert]).chunk(2, dim=-1)
            routed = F.linear(torch.tanh(gate) * up, self.down_proj[expert])
            out = out + routed * weights[..., expert : expert + 1]
        return out


class Moe(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.router = nn.Linear(HIDDEN, 3)
        self.experts = Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(dim=-1)
        return self.experts(x, weights.argmax(dim=-1), weights)


class NormedMlp(Mlp):
    def __init__(self, width: int):
        super().__init__(width)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


@dataclass(frozen=True)
class Unit:
    """module: takes a width. plan: styles of its parts, `unit` is the module itself."""

    module: type[nn.Module] | object
    plan: dict[str, str]


def _embedding(width: int) -> nn.Embedding:
    return nn.Embedding(ROWS, HIDDEN)


EXPERTS_PLAN = {
    "unit.experts.gate_up_proj": "packed_colwise",
    "unit.experts.down_proj": "rowwise",
    "unit.experts": "moe_tp_experts",
}
COLWISE, ROWWISE = {"unit.up": "colwise"}, {"unit.down": "rowwise"}
ROWWISE_TRANSPOSED = {"unit.down": "rowwise_transposed"}

UNITS = {
    "mlp": Unit(Mlp, {**COLWISE, **ROWWISE}),
    "gathered": Unit(Mlp, {"unit.up": "colwise_gather_output", "unit.down": "rowwise_split_input"}),
    "rep": Unit(Mlp, {"unit.up": "colwise_rep", "unit.down": "rowwise_rep"}),
    "replicate": Unit(Mlp, {"unit.up": "replicate", "unit.down": "rowwise_split_input"}),
    "packed": Unit(PackedMlp, {"unit.gate_up": "packed_colwise", **ROWWISE}),
    "packed3": Unit(Packed3Mlp, {"unit.three": "packed3_colwise", **ROWWISE}),
    "transposed": Unit(TransposedMlp, {"unit.up": "colwise_transposed", **ROWWISE_TRANSPOSED}),
    "transposed_packed": Unit(TransposedPackedMlp, {"unit.gate_up": "packed_colwise_transposed", **ROWWISE_TRANSPOSED}),
    "transposed_packed3": Unit(
        TransposedPacked3Mlp, {"unit.three": "packed3_colwise_transposed", **ROWWISE_TRANSPOSED}
    ),
    "packed_input": Unit(
        PackedInput,
        {"unit.left": "colwise", "unit.right": "colwise", "unit.down": "packed_rowwise", "unit": "all_reduce"},
    ),
    "bare_parameters": Unit(
        BareParameters,
        {"unit.up": "colwise", "unit.scale": "colwise", "unit.down": "rowwise", "unit": "all_reduce"},
    ),
    "first_dim": Unit(
        BareParameters,
        {"unit.up": "first_dim", "unit.scale": "first_dim", "unit.down": "rowwise", "unit": "all_reduce"},
    ),
    "head_norm": Unit(HeadNorm, {**COLWISE, "unit.norm": "replicated_with_grad_allreduce", **ROWWISE}),
    "head_norm_without_rule": Unit(HeadNorm, {**COLWISE, **ROWWISE}),
    "invariant_norm_with_rule": Unit(NormedMlp, {"unit.norm": "replicated_with_grad_allreduce", **COLWISE, **ROWWISE}),
    "sequence_norm": Unit(NormedMlp, {"unit.norm": "sequence_parallel", **COLWISE, **ROWWISE}),
    "local_params": Unit(HeadNorm, {"unit": "local_params", **COLWISE, **ROWWISE}),
    "shared_key": Unit(SharedKey, {"unit.compress": "mla_kv_a_proj", "unit.expand": "colwise", **ROWWISE}),
    "experts": Unit(Moe, {**EXPERTS_PLAN, "unit.experts.identity": "moe_identity_expert"}),
    "embedding_rowwise": Unit(_embedding, {"unit": "embedding_rowwise"}),
    "embedding_colwise": Unit(_embedding, {"unit": "embedding_colwise"}),
}
