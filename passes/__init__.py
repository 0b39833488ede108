"""The passes: one file each, one public function `(graph, context) -> None` that rewrites the graph in place.

A pass neither traces nor touches parameters. `ndcompile.pipeline` lists them in order.
"""
