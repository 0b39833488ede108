"""The copy of a model that is traced: no weights, plan modules wrapped."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ndcompile.capture.boundaries import Boundary, install_boundaries
from ndcompile.capture.expert_exchange import install_exchanges
from ndcompile.capture.opaque import OpaqueModules
from ndcompile.mesh import StorageMesh
from ndcompile.plans.sharding_plan import ShardingPlan
from ndcompile.private.transformers import copy_config_flags, input_gradient_hooks


class Shadow:
    """A copy of the model for tracing: no weights, plan modules wrapped. The user's model stays as it is."""

    def __init__(
        self, model: nn.Module, plan: ShardingPlan, mesh: StorageMesh, opaque: OpaqueModules | None = None
    ) -> None:
        """opaque: of another shadow of the same model, whose graph is to have the same nodes."""
        self.plan, self.device = plan, mesh.device
        self.module = copy_without_weights(model)
        if isinstance(model, PreTrainedModel):
            for module in self.module.modules():  # T5's stacks have configs of their own
                _forget_cache(getattr(module, "config", None))
        self.axes = {name: Boundary(axis) for name, axis in mesh.axes.items()}
        self.dropped: dict[str, Tensor] = {}
        if "tp" in self.axes:
            install_boundaries(self.module, plan, self.axes["tp"])
        if plan.experts:
            install_exchanges(self.module, plan.experts, self.axes, self.dropped)
        self.modules = dict(self.module.named_modules())
        self.opaque = OpaqueModules(copy_without_weights(model)) if opaque is None else opaque

    def follow(self, model: nn.Module) -> None:
        """Take over what may change between captures: training flags, and what the config says of code and outputs."""
        for name, module in model.named_modules():
            self.modules[name].training = module.training
            copy_config_flags(module, self.modules[name])


def copy_without_weights(model: nn.Module) -> Any:
    """A deep copy on the meta device, ties kept. Hooks of the top module stay behind: they run outside the graph. So do
    transformers' hooks for gradients of embeddings, which a graph does not need."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty(b.shape, dtype=b.dtype, device="meta")
    state = {key: model.__dict__[key] for key in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")}
    for key in state:
        memo[id(state[key])] = type(state[key])()
    if known := input_gradient_hooks(model):
        for module in model.modules():
            hooks = module._forward_hooks
            memo.setdefault(id(hooks), type(hooks)((key, hook) for key, hook in hooks.items() if key not in known))
    return copy.deepcopy(model, memo)


def _forget_cache(config: Any) -> None:
    """Graphs have no key-value cache unless asked: see call.py."""
    if isinstance(config, PreTrainedConfig):
        for part in [config, *(v for v in vars(config).values() if hasattr(v, "use_cache"))]:
            if getattr(part, "use_cache", None):
                part.use_cache = False
