"""Which checkpoint key fills which tensor of the model: transformers' renames and base-model prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ndcompile.loader.catalog import CheckpointError
from ndcompile.private.transformers import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    get_model_conversion_mapping,
    rename_source_key,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ConversionGroup:
    """Checkpoint keys that one converter turns into parameters (for example per-expert matrices into one tensor).

    `name` is the first parameter it makes. `sources` are (checkpoint key, source pattern that matched), in natural
    order: the converter stacks them in this order.
    """

    name: str
    converter: WeightConverter
    sources: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class KeyResolution:
    """`plain` maps a name of the model to its checkpoint key, `unexpected` a name that the model lacks to its key.

    `from_base_model`: the checkpoint was saved from the bare base model, so it has no head.
    """

    plain: Mapping[str, str]
    groups: tuple[ConversionGroup, ...]
    unexpected: Mapping[str, str]
    from_base_model: bool


def resolve_keys(model: PreTrainedModel, keys: Iterable[str]) -> KeyResolution:
    """Match checkpoint `keys` to the tensors of `model.state_dict()`, as transformers does.

    Raises CheckpointError if two keys name the same tensor.
    """
    # keep_vars: only the names count, so no tensor is detached.
    names = model.state_dict(keep_vars=True)
    mapping = get_model_conversion_mapping(model) or []
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    plain: dict[str, str] = {}
    sources: dict[str, list[tuple[str, str]]] = {}
    unexpected: dict[str, str] = {}
    # Natural order, because experts are stacked in it and some renames look at what came before.
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        if name not in names and key in names:
            # A pattern matched a name that was right already.
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, names)
        if name not in names:
            unexpected |= dict.fromkeys(_unmatched(name, converter_of.get(pattern)), key)
        elif pattern is not None:
            sources.setdefault(name, []).append((key, pattern))
        elif name in plain:
            raise CheckpointError(f"keys {plain[name]!r} and {key!r} of the checkpoint both name {name}")
        else:
            plain[name] = key
    if clashes := plain.keys() & sources.keys():
        name = min(clashes)
        raise CheckpointError(f"keys {plain[name]!r} and {sources[name][0][0]!r} of the checkpoint both name {name}")
    groups = tuple(ConversionGroup(name, converter_of[found[0][1]], tuple(found)) for name, found in sources.items())
    return KeyResolution(plain, groups, unexpected, _from_base_model(model, plain, groups))


def lost_sources(group: ConversionGroup) -> list[str]:
    """Keys missing between the numbered ones of `group`, such as one expert's: a guess, to explain an error."""
    parts = {key: key.split(".") for key, _ in group.sources}
    by_pattern: dict[str, list[str]] = {}
    for key, pattern in group.sources:
        by_pattern.setdefault(pattern, []).append(key)
    numbered: set[int] = set()
    for keys in by_pattern.values():
        columns = enumerate(zip(*(parts[key] for key in keys), strict=False))
        numbered |= {place for place, column in columns if len(set(column)) > 1 and all(map(str.isdigit, column))}
    if len(numbered) != 1:
        return []
    place = numbered.pop()
    count = 1 + max(int(part[place]) for part in parts.values() if len(part) > place and part[place].isdigit())
    lost = []
    for keys in by_pattern.values():
        first = parts[keys[0]]
        present = {int(parts[key][place]) for key in keys if parts[key][place].isdigit()}
        lost += [".".join([*first[:place], str(n), *first[place + 1 :]]) for n in range(count) if n not in present]
    return lost


def _unmatched(name: str, converter: WeightConverter | None) -> list[str]:
    """The names by which transformers reports a key that is not in the model: what it would have become."""
    if converter is None:
        return [name]
    return [name.replace(converter.target_patterns[0], target) for target in converter.target_patterns]


def _from_base_model(model: PreTrainedModel, plain: Mapping[str, str], groups: tuple[ConversionGroup, ...]) -> bool:
    """Whether every key had to be given the base-model prefix."""
    prefix = f"{model.base_model_prefix}."
    pairs = [*plain.items(), *((group.name, key) for group in groups for key, _ in group.sources)]
    return bool(pairs) and all(name.startswith(prefix) and not key.startswith(prefix) for name, key in pairs)
