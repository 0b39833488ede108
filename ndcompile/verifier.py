"""Facts that hold after every pass."""

from __future__ import annotations

from torch import fx

from ndcompile.pass_context import PassContext


def verify(graph: fx.Graph, context: PassContext, after: str) -> None:
    """Raise VerifyError where the graph breaks a rule; `after` names the pass that ran last."""
    graph.lint()
