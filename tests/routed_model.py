"""A MoE layer whose routing is an argument, so that a test can send every token where it wants."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import use_experts_implementation

HIDDEN, WIDTH, EXPERTS = 12, 20, 8

KINDS = {
    "gated": {},
    "no gate": {"has_gate": False},
    "transposed, with biases": {"is_transposed": True, "has_bias": True},
    "norm behind the experts": {"has_post_expert_norm": True},
}
PLAN = {
    "experts": "ep_dispatch_experts",
    **{f"experts.{name}": "grouped_gemm" for name in ("gate_up_proj", "up_proj", "down_proj")},
    **{f"experts.{name}": "grouped_gemm" for name in ("gate_up_proj_bias", "down_proj_bias")},
}


class RoutedConfig(PretrainedConfig):
    model_type = "routed"

    def __init__(self, kind: str = "gated", **kwargs):
        self.kind, self.num_experts_per_tok = kind, 2
        super().__init__(**kwargs)


class Experts(nn.Module):
    """transformers' decorated experts, of every kind that its decorator knows."""

    def __init__(self, config: RoutedConfig):
        super().__init__()
        flags = KINDS[config.kind]
        self.num_experts, self.act_fn = EXPERTS, torch.tanh
        up, down = (2 * WIDTH if flags.get("has_gate", True) else WIDTH, HIDDEN), (HIDDEN, WIDTH)
        if flags.get("is_transposed"):
            up, down = up[::-1], down[::-1]
        name = "gate_up_proj" if flags.get("has_gate", True) else "up_proj"
        self.register_parameter(name, nn.Parameter(torch.randn(EXPERTS, *up) / 3))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, *down) / 3)
        if flags.get("has_bias"):
            self.gate_up_proj_bias = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH))
            self.down_proj_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        if flags.get("has_post_expert_norm"):
            self.post_expert_norm = nn.LayerNorm(HIDDEN)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise NotImplementedError


EXPERTS_OF = {
    kind: use_experts_implementation(type(f"Experts{number}", (Experts,), {}), **flags)
    for number, (kind, flags) in enumerate(KINDS.items())
}
"""What the decorator @use_experts_implementation makes of it. (transformers looks for this line in the source.)"""


class RoutedModel(PreTrainedModel):
    """index (batch, sequence, 2) says which experts a token meets; a router gives the weights."""

    config_class = RoutedConfig

    def __init__(self, config: RoutedConfig):
        super().__init__(config)
        self.before = nn.Linear(HIDDEN, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = EXPERTS_OF[config.kind](config)
        self.post_init()

    def forward(self, inputs_embeds: Tensor, index: Tensor) -> Tensor:
        hidden = self.before(inputs_embeds).flatten(0, 1)
        index = index.flatten(0, 1)
        weights = self.router(hidden).softmax(-1).gather(1, index.clamp(0, EXPERTS - 1))
        return hidden + self.experts(hidden, index, weights)

    @classmethod
    def plan(cls, kind: str) -> dict[str, str]:
        """The ep_plan rules that match a parameter or module of this kind."""
        with torch.device("meta"):
            model = cls(RoutedConfig(kind=kind))
        names = {name for name, _ in [*model.named_modules(), *model.named_parameters()]}
        return {name: style for name, style in PLAN.items() if name in names}


def build(kind: str = "gated") -> RoutedModel:
    """The same weights at every call."""
    torch.manual_seed(0)
    model = RoutedModel(RoutedConfig(kind=kind))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()
