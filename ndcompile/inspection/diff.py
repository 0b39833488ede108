"""What differs between two reports, as lines, readable at 100 columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from ndcompile.inspection.report import BoundaryRow, Figure, Report
from ndcompile.inspection.show import spell_bytes_of, spell_count, spell_mesh, spell_seconds
from ndcompile.loader.rank_reads import spell_bytes

WIDTH = 100


def diff(old: Report, new: Report) -> str:
    """Lines with - (old) and + (new) under the headings of what they are of; "" where nothing differs."""
    parts = {
        "plan": _rows({"": _head(old)}, {"": _head(new)}),
        "parameters": _rows(_parameters(old), _parameters(new)),
        "boundaries": _rows(_boundaries(old), _boundaries(new)),
        "collectives": _rows(_collectives(old), _collectives(new)),
        "memory": _figures(old.memory, new.memory, spell_bytes_of),
        "computation": _figures(old.compute, new.compute, spell_count),
        "time": _figures(old.time, new.time, spell_seconds),
    }
    found = {title: list(lines) for title, lines in parts.items()}
    return "".join(f"{title}\n{''.join(map(_wrapped, lines))}" for title, lines in found.items() if lines)


def diff_pass(report: Report, name: str) -> str:
    """The nodes that the pass `name` changed, as lines: + added, - removed, ~ with other inputs or another type.

    Of layers that are alike only those that were traced. Raises ValueError for a name that is no pass of the report.
    """
    found = {row.name: row for row in report.passes}
    if name not in found:
        raise ValueError(f"{name!r} is no pass of this plan. Passes: {', '.join(found)}.")
    row = found[name]
    lines = row.changes or ("(no node changed)",)
    return "\n".join([f"pass {name}: {row.summary}", f"{row.nodes} nodes behind it", *lines]) + "\n"


def _head(report: Report) -> str:
    return (
        f"{report.model} on {spell_mesh(report.mesh)}, {report.ranks} ranks, {report.batch_size} x {report.seq_len} "
        f"tokens, {report.rates['name']}"
    )


def _wrapped(line: str) -> str:
    """A line of a part; what does not fit stands below it, further in. It is cut behind commas alone."""
    glued = line.replace(" ", "\N{NO-BREAK SPACE}").replace(",\N{NO-BREAK SPACE}", ", ")
    cut = textwrap.fill(glued, WIDTH, **_INDENT, break_long_words=False, break_on_hyphens=False)
    return cut.replace("\N{NO-BREAK SPACE}", " ") + "\n"


_INDENT: Any = {"initial_indent": "  ", "subsequent_indent": 8 * " "}


def _parameters(report: Report) -> dict[Any, str]:
    return {
        (
            row.name,
            row.fqns,
        ): f"{row.name}: {_places(row.placements)}, {'x'.join(map(str, row.local_shape))} {row.dtype} a "
        f"rank, {row.after_forward}, {row.rule}"
        for row in report.parameters
    }


def _places(placements: Any) -> str:
    return ", ".join(f"{axis} {place}" for axis, place in placements.items()) or "whole"


def _boundaries(report: Report) -> dict[Any, str]:
    """Rows that begin alike are told apart by how many came before."""
    seen: Counter[Any] = Counter()
    rows = {}
    for row in report.boundaries:
        place = row.module, row.axis, row.source, row.destination
        rows[*place, seen[place]] = _boundary(row)
        seen[place] += 1
    return rows


def _boundary(row: BoundaryRow) -> str:
    return (
        f"{row.module} {row.axis} {row.source} -> {row.destination}: {row.forward or '-'} / {row.backward or '-'}, "
        f"{spell_bytes(row.nbytes)}, {row.count} a step"
    )


def _collectives(report: Report) -> dict[Any, str]:
    return {
        (row.kind, row.axis, row.phase, row.purpose): f"{row.kind} over {row.axis}={row.ranks}, {row.phase}, "
        f"{row.purpose}: {row.count}, {spell_bytes(row.nbytes)}, {spell_seconds(row.seconds)}"
        for row in report.collectives
    }


def _figures(old: tuple[Figure, ...], new: tuple[Figure, ...], spell: Callable[[Figure], str]) -> Iterator[str]:
    return _rows(*({f.name: f"{f.name}: {spell(f)}" for f in figures} for figures in (old, new)))


def _rows(old: dict[Any, str], new: dict[Any, str]) -> Iterator[str]:
    """Lines of equal keys below each other, in the order of both."""
    gone = set(old.values()) - set(new.values())
    came = set(new.values()) - set(old.values())
    for key in dict.fromkeys((*old, *new)):
        if old.get(key) in gone:
            yield f"- {old[key]}"
        if new.get(key) in came:
            yield f"+ {new[key]}"
