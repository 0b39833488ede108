"""A tp_plan from the graph of a model that has none: pairs are proposed, and the proof decides. See docs/proof.md."""

from ndcompile.derive.search import DERIVE, Derivation, derive, derive_tp_plan, with_derived_plan

__all__ = ["DERIVE", "Derivation", "derive", "derive_tp_plan", "with_derived_plan"]
