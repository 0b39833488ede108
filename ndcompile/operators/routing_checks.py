"""Checks of routing inside the graph: operators that pass a value on, or raise on the host.

They are opaque to autograd's and inductor's tracing, and the value that they return is what the graph goes on with, so
they are neither removed nor moved behind the exchange that they guard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ndcompile.errors import RoutingError


def _checked_splits(splits: Tensor, layer: str, experts: int) -> Tensor:
    """Rows to send to and to receive from each rank, int64 (2, ep), of `splits` (3, ep) on the CPU. The last column
    holds the sums instead of the last rank's.

    The last row of `splits` counts, for each rank, the routing indices that name no expert. The ranks exchanged it, so
    all of them raise RoutingError.
    """
    send, receive, bad = splits.tolist()  # the device waits for what follows: a list costs less than a tensor's slices
    if any(bad):
        counts = {rank: count for rank, count in enumerate(bad) if count}
        raise RoutingError(
            f"{layer!r}: routing indices outside the {experts} experts, on the ranks of the expert group (with how "
            f"many): {counts}. Indices must be in [0, {experts}): check the router's top-k."
        )
    return torch.tensor([[*send[:-1], sum(send)], [*receive[:-1], sum(receive)]], dtype=splits.dtype)


_library = torch.library.Library("ndcompile", "FRAGMENT")
_library.define("checked_splits(Tensor splits, str layer, int experts) -> Tensor")
_library.impl("checked_splits", _checked_splits, "CPU")
_library.impl("checked_splits", lambda splits, layer, experts: splits.new_empty(2, splits.shape[1]), "Meta")

checked_splits = torch.ops.ndcompile.checked_splits.default
"""The operator as it stands in a graph. Not a `torch.library.custom_op`: its layers take 25 microseconds a call."""


@torch.library.custom_op("ndcompile::require", mutates_args=())
def require(x: Tensor, ok: Tensor, message: str) -> Tensor:
    """A copy of `x` where `ok`, a boolean scalar, holds. On the CPU RoutingError; on a GPU a device-side assertion, as
    reading `ok` would wait for the device."""
    if ok.device.type != "cpu":
        torch._assert_async(ok, message)
    elif not ok:
        raise RoutingError(message)
    return x.clone()


@require.register_fake
def _(x: Tensor, ok: Tensor, message: str) -> Tensor:
    return torch.empty_like(x)


require.register_autograd(lambda ctx, grad: (grad, None, None))
