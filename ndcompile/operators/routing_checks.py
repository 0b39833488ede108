"""Checks of routing inside the graph: operators that pass a value on, or raise on the host.

They are opaque to autograd's and inductor's tracing, and the value that they return is what the graph goes on with, so
they are neither removed nor moved behind the exchange that they guard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ndcompile.errors import RoutingError


@torch.library.custom_op("ndcompile::checked_splits", mutates_args=())
def checked_splits(splits: Tensor, layer: str, experts: int) -> Tensor:
    """Rows to send to and to receive from each rank, int64 (2, ep), of `splits` (3, ep) on the CPU. The last column
    holds the sums instead of the last rank's.

    The last row of `splits` counts, for each rank, the routing indices that name no expert. The ranks exchanged it, so
    all of them raise RoutingError.
    """
    if (bad := splits[2]).any():
        counts = {rank: count for rank, count in enumerate(bad.tolist()) if count}
        raise RoutingError(
            f"{layer!r}: routing indices outside the {experts} experts, on the ranks of the expert group (with how "
            f"many): {counts}. Indices must be in [0, {experts}): check the router's top-k."
        )
    return torch.cat([splits[:2, :-1], splits[:2].sum(1, keepdim=True)], 1)


@checked_splits.register_fake
def _(splits: Tensor, layer: str, experts: int) -> Tensor:
    return splits.new_empty(2, splits.shape[1])


CHECKED_SPLITS = torch.ops.ndcompile.checked_splits.default
"""The operator as it stands in a graph."""


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
