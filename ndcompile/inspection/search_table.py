"""A search as terminal tables, readable at 100 columns."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ndcompile.inspection.search_result import Candidate, Illegal, SearchResult, Unfit
from ndcompile.loader.rank_reads import spell_bytes

WIDTH, SHOWN = 100, 12
CAPTION = """\
step = seconds of the critical path of computation, communication and optimizer at the rates above;
tokens/s a rank = tokens of the step / ranks / step; exposed = share of the communication that
kernels wait for; states = parameters + gradients + 2 moments of AdamW; peak = the most bytes alive"""
"""Formulas of the columns; those of the parts of a step are under `ndcompile plan`."""


def search_table(result: SearchResult, every: bool = False) -> str:
    """Text of a search, WIDTH columns at most: the first layouts that fit, or `every` one, what does not fit, what is
    not legal."""
    console = Console(file=io.StringIO(), width=WIDTH)
    tokens = result.batch_size * result.seq_len
    console.print(
        f"{result.model} on {result.world} ranks of {spell_bytes(result.memory_bytes)}, a step of {tokens:,} tokens "
        f"({result.batch_size} x {result.seq_len}), rates {result.rates}",
        highlight=False,
    )
    shown = result.fitting if every else result.fitting[:SHOWN]
    if shown:
        console.print(_fitting(shown))
        console.print(CAPTION, highlight=False)
    if len(result.fitting) > len(shown):
        more = len(result.fitting) - len(shown)
        console.print(f"and {more} slower ones that fit (--all lists them)", highlight=False)
    if result.unfit:
        console.print(_unfit(result.unfit))
    if result.illegal:
        console.print(_illegal(result.illegal))
    if result.advice:
        console.print(result.advice, highlight=False)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _fitting(candidates: Sequence[Candidate]) -> Table:
    table = _table(
        "layouts that fit, the fastest first",
        *("dp_replicate", "fsdp", "tp", "ep", "step", "tokens/s a rank", "exposed", "states", "peak"),
    )
    for found in candidates:
        sizes = map(str, vars(found.layout).values())
        seconds = f"{found.step * 1e3:,.0f} ms" if found.step >= 0.01 else f"{found.step * 1e3:.2f} ms"
        numbers = (f"{found.tokens:,.0f}", f"{found.exposed:.0%}", spell_bytes(found.states), spell_bytes(found.peak))
        table.add_row(*sizes, seconds, *numbers)
    return table


def _unfit(layouts: Sequence[Unfit]) -> Table:
    """A line for each pair (tp, ep) and cause."""
    groups: dict[tuple[int, int, bool], list[Unfit]] = defaultdict(list)
    for other in layouts:
        groups[other.layout.tp, other.layout.ep, other.peak is None].append(other)
    table = _table("layouts that do not fit", "tp", "ep", "fsdp", "needed a rank")
    table.add_column("for", overflow="fold")
    for (tp, ep, states), group in groups.items():
        fsdp = sorted(other.layout.fsdp for other in group)
        cause = "parameters, gradients and AdamW's moments alone" if states else "these and activations, at the peak"
        table.add_row(str(tp), str(ep), _span(fsdp, str), _span([other.needed for other in group], spell_bytes), cause)
    return table


def _illegal(sizes: Sequence[Illegal]) -> Table:
    table = Table(title="sizes that are not legal", title_justify="left")
    table.add_column("size", max_width=20, overflow="fold")
    table.add_column("reason", overflow="fold")
    groups: dict[str, list[Illegal]] = defaultdict(list)
    for entry in sizes:  # reasons that only differ in the size are one
        groups[entry.reason.replace(entry.where, "")].append(entry)
    for group in groups.values():
        others = [entry.where.partition("=")[2] for entry in group[1:]]
        table.add_row(", ".join([group[0].where, *others]), group[0].reason)
    return table


def _span(values: Sequence[int], spell) -> str:
    """The least and the largest of some numbers."""
    low, high = spell(min(values)), spell(max(values))
    return low if low == high else f"{low} to {high}"
