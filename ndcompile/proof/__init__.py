"""Proof that a rank's graph computes what the same code computes without tp; see docs/proof.md.

`rules` holds the table, `prove` walks a graph with it.
"""
