"""Rates of the machine at hand, measured: what `ndcompile plan` and `ndcompile search` estimate times from."""

from ndcompile.measurement.measure import Measured, measure_rates

__all__ = ["Measured", "measure_rates"]
