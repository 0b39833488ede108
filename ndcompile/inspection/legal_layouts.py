"""Which layouts of a number of ranks a model can have, and why it cannot have the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ndcompile.inspection.search_result import Illegal, Layout


def legal_layouts(
    world: int, batch_size: int, refusal: Callable[[Layout], str], has_experts: bool
) -> tuple[list[list[Layout]], list[Illegal]]:
    """Layouts that a model can have on `world` ranks, by family, and the sizes that it cannot have.

    refusal: why the model cannot have a layout; "" if it can. A family's steps are one program.
    """
    families: list[list[Layout]] = []
    illegal: dict[str, str] = {}
    for tp in _divisors(world):
        ranks = world // tp
        if reason := refusal(Layout(1, ranks, tp)):
            illegal[f"tp={tp}"] = reason
            continue
        if batch_size % ranks:
            illegal[f"tp={tp}"] = (
                f"A batch of {batch_size} sequences does not divide over {ranks} data ranks (dp_replicate x fsdp). "
                f"Legal with tp={tp}: multiples of {ranks}."
            )
            continue
        families += _families(world, tp, 1)
        illegal |= _no_multiples(world, tp) if has_experts else {}
        for ep in (tp * rest for rest in _divisors(ranks) if tp * rest > 1 and has_experts):
            if reason := refusal(Layout(1, ranks, tp, ep)):
                illegal.setdefault(f"ep={ep}", reason)
            else:
                families += _families(world, tp, ep)
                illegal |= _too_few_data_ranks(world, tp, ep)
    return families, [Illegal(where, reason) for where, reason in illegal.items()]


def _no_multiples(world: int, tp: int) -> dict[str, str]:
    """The numbers of expert shards that do not go with `tp`, and why."""
    return _not_multiple_of(
        tp,
        [ep for ep in _divisors(world) if ep > 1],
        f"tp={tp}, ep",
        f"ep counts expert shards, of which the {tp} ranks of a tp group hold as many each: it must be a multiple of "
        f"tp={tp}. Multiples on {world} ranks",
    )


def _too_few_data_ranks(world: int, tp: int, ep: int) -> dict[str, str]:
    """The sizes of fsdp that do not go with `tp` and `ep`, and why."""
    return _not_multiple_of(
        rest := ep // tp,
        _divisors(world // tp),
        f"tp={tp}, ep={ep}, fsdp",
        f"The {ep} expert shards lie on tp x fsdp ranks: fsdp must be a multiple of ep / tp = {rest}. "
        f"Legal fsdp sizes with tp={tp}, ep={ep}",
    )


def _not_multiple_of(unit: int, sizes: Sequence[int], axis: str, reason: str) -> dict[str, str]:
    """Those of an axis' `sizes` that are no multiples of `unit`, as one entry whose reason ends with the others."""
    legal = [size for size in sizes if size % unit == 0]
    left_out = ", ".join(str(size) for size in sizes if size % unit)
    return {f"{axis}={left_out}": f"{reason}: {legal}."} if left_out else {}


def _families(world: int, tp: int, ep: int) -> list[list[Layout]]:
    """The layouts of a pair whose steps are one program: without fsdp, and with it, which grows."""
    ranks, rest = world // tp, max(ep // tp, 1)
    layouts = [Layout(ranks // fsdp, fsdp, tp, ep) for fsdp in _divisors(ranks) if fsdp % rest == 0]
    families = [layout for layout in layouts if layout.fsdp == 1], [layout for layout in layouts if layout.fsdp > 1]
    return [family for family in families if family]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
