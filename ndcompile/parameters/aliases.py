"""Local aliases of the DTensor parameters, for optimizers that torch cannot run on DTensors."""

from __future__ import annotations

from torch import Tensor, nn

from ndcompile.parameters.storage import ParameterStore


def alias_parameters(store: ParameterStore) -> list[nn.Parameter]:
    """A plain Parameter for every trainable stored one: the same memory, and its gradient's."""
    return [_alias(slot.parameter) for slot in store.slots if slot.parameter.requires_grad]


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    alias = nn.Parameter(_local(parameter))

    def follow_zero_grad(grad: Tensor) -> None:
        """Before a gradient is added: what was cleared on the alias is cleared on the parameter."""
        if alias.grad is None:
            parameter.grad = None

    def share_gradient(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        alias.grad = _local(parameter.grad)

    parameter.register_hook(follow_zero_grad)
    parameter.register_post_accumulate_grad_hook(share_gradient)
    if parameter.grad is not None:
        share_gradient(parameter)
    return alias


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor.detach()  # type: ignore[attr-defined]
