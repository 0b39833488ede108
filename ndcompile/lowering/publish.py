"""A graph to torch's own channels: the log, and the structured trace that tlparse reads."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import fx

from ndcompile.graphs.dump import dump
from ndcompile.private.inductor import trace_structured

_logger = logging.getLogger("ndcompile.passes")


def publish(name: str, graph: fx.Graph, groups: Mapping[str, str]) -> None:
    """The graph as the pass `name` left it, to whoever listens; the text is made only then.

    As text to the log at debug level (`TORCH_LOGS="+ndcompile"`), and as an artifact `ndcompile_<pass>` to the
    structured trace (`TORCH_TRACE=folder`). groups: process groups -> names of axes.
    """
    if _logger.isEnabledFor(logging.DEBUG):
        _logger.debug("graph after %s, %d nodes\n%s", name, len(graph.nodes), dump(graph, groups))
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"ndcompile_{name}", "encoding": "string"},
        payload_fn=lambda: dump(graph, groups),
        expect_trace_id=False,
    )
