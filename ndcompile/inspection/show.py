"""A report as terminal tables that stay readable at 100 columns and when piped."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console
from rich.table import Table

from ndcompile.inspection.report import Figure, Report
from ndcompile.loader.rank_reads import spell_bytes

WIDTH = 100
"""Columns where the output is no terminal."""
COLLECTIVES = "Collectives of a step"
CAPTION = """\
bytes = summed, each of the larger side (gathered, or not yet reduced or scattered)
sent = what a rank sends in a ring of n: bytes x (n - 1) / n, twice that for an all-reduce
bytes in, of boundaries above = the local tensor that enters; time = by the rates, see communication"""
"""Formulas of the columns."""
STEPS = 10
"""Lines of the critical path; the page and the JSON have all of its steps."""


def text(report: Report, width: int = WIDTH) -> str:
    """The tables as plain text."""
    file = io.StringIO()
    show(report, width, file)
    return file.getvalue()


def show(report: Report, width: int | None, file: TextIO) -> None:
    """Print the tables to `file`; width None is the terminal's, or WIDTH where there is none."""
    console = Console(file=file, width=width or (None if file.isatty() else WIDTH), highlight=False)
    console.print(_head(report), markup=False)
    for table in (_parameters(report), _boundaries(report), _collectives(report), _saved(report)):
        console.print()
        console.print(table)
        if table.title == COLLECTIVES:
            console.print(CAPTION, markup=False)
    for title, figures, spell in (
        ("Memory of a rank", report.memory, spell_bytes_of),
        ("Computation of a rank", report.compute, spell_count),
        ("Time of a step", report.time, spell_seconds),
    ):
        console.print()
        console.print(_figures(title, figures, spell))
    console.print()
    console.print(_critical_path(report))
    console.print(_rates(report), markup=False)
    for line in (*report.experts, *report.notes):
        console.print(line, markup=False, soft_wrap=False)


def _head(report: Report) -> str:
    mesh = spell_mesh(report.mesh)
    storage = " x ".join(f"{name}={size}" for name, size in report.storage.items())
    lines = [f"{report.model} on {mesh}: {report.ranks} ranks"]
    if storage:
        lines.append(f"parameters are cut by {storage}, in this order")
    lines.append(
        f"each data rank: {report.batch_size} sequences of {report.seq_len} tokens; rates {report.rates['name']}"
    )
    return "\n".join(lines)


def spell_mesh(mesh: Mapping[str, int]) -> str:
    """Axes of more than one rank."""
    return " x ".join(f"{name}={size}" for name, size in mesh.items() if size > 1) or "one rank"


def _parameters(report: Report) -> Table:
    table = _table("Parameters")
    table.add_column("name and rule", overflow="fold", ratio=1)
    for column in ("n", "global", "placements", "of a rank"):
        table.add_column(column, overflow="fold")
    for row in report.parameters:
        aliases = "".join(f"\n= {alias}" for alias in row.aliases)
        where = "\n".join(f"{axis} {place}" for axis, place in row.placements.items() if place != "R") or "whole"
        table.add_row(
            f"{row.name}{aliases}\n  {row.rule}",
            str(len(row.fqns)),
            f"{_shape(row.shape)}\n{row.dtype}",
            where,
            f"{_shape(row.local_shape)}\n{row.after_forward if report.mesh['fsdp'] > 1 else ''}",
        )
    return table


def _boundaries(report: Report) -> Table:
    table = _table("Boundaries: where a value changes its layout")
    table.add_column("module", overflow="fold", ratio=1)
    for column in ("axis", "layout", "forward", "backward"):
        table.add_column(column, no_wrap=True)
    table.add_column("bytes in", justify="right", no_wrap=True)
    table.add_column("a step", justify="right")
    for row in report.boundaries:
        layout = f"{row.source} -> {row.destination}"
        nbytes = spell_bytes(row.nbytes)
        table.add_row(row.module or "(model)", row.axis, layout, row.forward, row.backward, nbytes, str(row.count))
    return table


def _collectives(report: Report) -> Table:
    table = _table(COLLECTIVES)
    for column in ("kind", "axis", "phase", "for"):
        table.add_column(column, no_wrap=True)
    for column in ("count", "bytes", "sent", "time"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in report.collectives:
        axis = f"{row.axis}={row.ranks}"
        numbers = (str(row.count), spell_bytes(row.nbytes), spell_bytes(row.sent), spell_seconds(row.seconds))
        table.add_row(row.kind, axis, row.phase, row.purpose, *numbers)
    return table


def _saved(report: Report) -> Table:
    table = _table("Saved for backward")
    table.add_column("module", overflow="fold", ratio=1)
    for column in ("operator", "dtype", "of a rank"):
        table.add_column(column, no_wrap=True)
    for column in ("count", "bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in report.saved:
        numbers = (str(row.count), spell_bytes(row.nbytes))
        table.add_row(row.module or "(model)", row.operator, row.dtype, _shape(row.shape), *numbers)
    return table


def _figures(title: str, figures: tuple[Figure, ...], spell: Callable[[Figure], str]) -> Table:
    table = _table(title)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("how it comes about", overflow="fold", ratio=1)
    for figure in figures:
        table.add_row(figure.name, spell(figure), figure.formula)
    return table


def _critical_path(report: Report) -> Table:
    """The longest kinds of work on the path, each kind summed over its steps."""
    kinds: dict[tuple[str, str], list[float]] = {}
    for step in report.critical_path:
        kinds.setdefault((step.what, step.phase), []).append(step.seconds)
    total = sum(step.seconds for step in report.critical_path) or 1.0
    ordered = sorted(kinds.items(), key=lambda entry: -sum(entry[1]))
    table = _table("Critical path: what the step waits for, the longest first")
    table.add_column("what", overflow="fold", ratio=1)
    table.add_column("phase", no_wrap=True)
    for column in ("stretches", "time", "of the step"):
        table.add_column(column, justify="right", no_wrap=True)
    for (what, phase), seconds in ordered[:STEPS]:
        time = sum(seconds)
        table.add_row(what, phase, str(len(seconds)), spell_seconds(time), f"{time / total:.1%}")
    return table


def _rates(report: Report) -> str:
    """The values that the times are computed from."""
    values = (f"{name}={value:g}" for name, value in report.rates.items() if not isinstance(value, str))
    return f"rates {report.rates['name']}, bytes a second and seconds: {', '.join(values)}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", expand=True, box=None, padding=(0, 1), header_style="bold")


def spell_bytes_of(figure: Figure) -> str:
    return spell_bytes(int(figure.value))


def spell_count(figure: Figure) -> str:
    """Operations as such, times as such."""
    return f"{figure.value:.3g}" if "FLOP" in figure.name else spell_seconds(figure)


def spell_seconds(figure: Figure | float) -> str:
    """Seconds in the unit that fits; shares in percent."""
    value = figure.value if isinstance(figure, Figure) else figure
    if isinstance(figure, Figure) and "share" in figure.name:
        return f"{value:.1%}"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return "0 s" if value == 0 else f"{value * 1e6:.2g} us"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
