"""A report as one HTML file: the template beside this file with the data in it.

The file loads nothing: style, script and data are inside, and its content policy forbids the rest.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from ndcompile.inspection.report import Report
from ndcompile.inspection.serial import plain

PARTS = {"/* style */": ("page.css",), "/* script */": ("page_model.js", "page.js")}
"""Places of the template, and the files that go there: what the data means, and how it is drawn."""
DATA = "/* data */"


def write_page(report: Report, path: str | Path) -> None:
    """Write `report` to `path` as one static HTML page.

    Raises what `check_page_path` raises.
    """
    check_page_path(path)
    Path(path).write_text(page(report), encoding="utf-8")


def check_page_path(path: str | Path) -> None:
    """To be asked before a report is computed.

    Raises FileNotFoundError for a folder that does not exist, and IsADirectoryError where `path` is one.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: the folder {path.parent} does not exist. Create it, or write elsewhere.")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Give the name of a file in it, such as {path / 'plan.html'}.")


def page(report: Report) -> str:
    """The HTML text."""
    text = _template("page.html")
    for place, names in PARTS.items():
        text = text.replace(place, "\n".join(map(_template, names)))
    return text.replace(DATA, embedded(report))  # the last one: names in the data are not looked at


def embedded(report: Report) -> str:
    """JSON that can stand in a script element: no `<`, so neither `</script>` nor `<!--` can end or extend it."""
    return json.dumps(_drawn(report), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _drawn(report: Report) -> Any:
    """What the page draws: ranges of thousands of ranks are megabytes, and it has no table of them."""
    data = plain(report)
    del data["rank_strides"]
    for row in data["parameters"]:
        del row["cut_by"], row["ranges"]
    return data


def _template(name: str) -> str:
    return (files("ndcompile.inspection") / name).read_text(encoding="utf-8")
