"""The JSON form of a report, see docs/inspection.md."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ndcompile.errors import NdcompileError
from ndcompile.inspection.report import (
    SCHEMA,
    BoundaryRow,
    CollectiveRow,
    Figure,
    ParameterRow,
    PassRow,
    PathStep,
    Report,
    SavedRow,
)
from ndcompile.inspection.search_result import SearchResult

SEARCH_SCHEMA = 1
"""Version of the JSON form of a search; it grows as that of a report does."""

ROWS: dict[str, type] = {
    "parameters": ParameterRow,
    "boundaries": BoundaryRow,
    "collectives": CollectiveRow,
    "passes": PassRow,
    "memory": Figure,
    "compute": Figure,
    "time": Figure,
    "critical_path": PathStep,
    "saved": SavedRow,
}
"""Fields of a report that are lists of objects."""


def write_report(report: Report, path: str | Path) -> None:
    """Write `report` as JSON."""
    Path(path).write_text(json.dumps(plain(report), indent=1) + "\n", encoding="utf-8")


def write_search(result: SearchResult, path: str | Path) -> None:
    """Write what a search found as JSON: its fields, and `schema`."""
    Path(path).write_text(json.dumps({"schema": SEARCH_SCHEMA} | plain(result), indent=1) + "\n", encoding="utf-8")


def read_report(path: str | Path) -> Report:
    """The report of a JSON file.

    Raises OSError if it cannot be read, and NdcompileError for what is no report, or one of another schema.
    """
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise NdcompileError(f"{path} is no JSON: {error}") from error
    if not isinstance(given, dict) or not isinstance(given.get("schema"), int):
        raise NdcompileError(
            f"{path} is no plan: it has no 'schema'. Write one with Plan.to_json or ndcompile plan --json."
        )
    if given["schema"] != SCHEMA:
        raise NdcompileError(f"{path} has schema {given['schema']}, this ndcompile reads {SCHEMA}. Plan again.")
    given.setdefault("saved", [])  # came after the first files of this schema
    try:
        rows = {name: tuple(_build(kind, row) for row in given.pop(name)) for name, kind in ROWS.items()}
        return _build(Report, given | rows)
    except (KeyError, TypeError) as error:
        raise NdcompileError(f"{path} is no plan of schema {SCHEMA}: {error}. Plan again.") from error


def plain(value: Any) -> Any:
    """Dataclasses and mappings of any kind as dicts, tuples as lists."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def _build(kind: type, given: Mapping[str, Any]) -> Any:
    """An object of the fields that `kind` knows: a newer file of the same schema may have more."""
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: _frozen(value) for name, value in given.items() if name in known})


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value
