"""The page of a plan: the data inside it, and what a browser makes of it.

`UPDATE_GOLDEN=1 pytest tests/test_inspection_page.py` writes the golden file anew; read the difference.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
from math import prod
from pathlib import Path

import models
import pytest
import torch
from sample_report import sample_report
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from torch.distributed.tensor import Replicate, Shard

import ndcompile
from ndcompile.inspection.page import check_page_path, page, write_page
from ndcompile.inspection.report import ParameterRow, Report
from ndcompile.parameters.layout import intervals
from ndcompile.private.distributed import StridedShard

GOLDEN = Path(__file__).parent / "golden" / "page_data.json"
SCREENSHOT = Path(__file__).parent.parent / "build" / "plan-page.png"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --hide-scrollbars"
)


def test_the_data_of_a_page_is_the_report():
    data = json.loads(_data(page(sample_report(layers=2))))
    text = json.dumps(data, indent=1) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_names_cannot_end_the_data():
    name = "</script><!-- <script> /* style */ /* script */ /* data */"
    html = page(dataclasses.replace(sample_report(layers=2), model=name))
    assert json.loads(_data(html))["model"] == name
    assert html.count(name) == 0
    assert html.count("</script>") == 2


def test_a_page_refers_to_nothing_outside():
    html = page(sample_report(layers=2))
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)|@import|url\(|fetch\(|XMLHttpRequest""", html)
    assert "default-src 'none'" in html


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "plans"))):
        write_page(sample_report(layers=2), tmp_path / "plans" / "plan.html")
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        check_page_path(tmp_path)
    assert not list(tmp_path.iterdir())


def _data(html: str) -> str:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return found.group(1)


# What follows needs a browser.


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not (CHROMIUM and DRIVER):
        pytest.skip("no Chromium with its driver. Install them: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def show(browser, tmp_path):
    """Opens a report in a window of a width and a colour scheme; in the end the console must be empty."""

    def opened(report: Report, width: int = 1400, scheme: str = "light"):
        write_page(report, tmp_path / "plan.html")
        window = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        browser.get((tmp_path / "plan.html").as_uri())
        return browser

    yield opened
    assert browser.get_log("browser") == []


def _find(browser, selector: str):
    return browser.find_element(By.CSS_SELECTOR, selector)


def _shown(browser, selector: str) -> list[str]:
    """Texts of the elements that can be seen."""
    return [e.text for e in browser.find_elements(By.CSS_SELECTOR, selector) if e.is_displayed()]


def _tab_to(browser, element) -> None:
    """Reach an element as one without a mouse does."""
    body = _find(browser, "body")
    for _ in range(100):
        if browser.switch_to.active_element == element:
            return
        (browser.switch_to.active_element or body).send_keys(Keys.TAB)
    raise AssertionError("the Tab key does not lead there")


def test_the_page_says_what_the_report_says(show):
    browser = show(sample_report())
    assert browser.title == "Qwen3MoeForCausalLM: sharding plan"
    assert "3.82 billion of 30.5 billion parameters" in _find(browser, "#summary").text
    assert _shown(browser, "#memory .figure.total .measure") == ["38.4\nGiB"]
    assert len(_shown(browser, "#tree .leaf")) == 14
    rows = {tuple(text.split()[:4]): text for text in _shown(browser, "#collective-table tbody tr")}
    assert "96 13.5 GiB 6.8 GiB 19.2 % 16.1 ms" in re.sub(r"\s+", " ", rows["all_gather", "efsdp", "2", "forward"])
    assert {text.split("\n")[0] for text in _shown(browser, "#legend > div")} == {"S(d)", "S(d) x n", "R", "I", "P"}
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_search_filters_tree_and_tables_and_counts(show):
    browser = show(sample_report())
    count, search = _find(browser, "#count"), _find(browser, "#search")
    everything = "14 parameters · 8 boundaries · 13 collectives · 4 passes"
    assert count.text == everything
    _find(browser, "body").send_keys("/")
    assert browser.switch_to.active_element == search
    search.send_keys("q_proj")
    assert count.text == "1 of 14 parameters · 1 of 8 boundaries · 0 of 13 collectives · 0 of 4 passes"
    assert [text.split("\n")[0] for text in _shown(browser, "#tree .leaf")] == ["q_proj.weight"]
    assert len(_shown(browser, "#boundary-table tbody tr")) == 1
    assert "No collective has this in its name." in _shown(browser, ".nothing")
    search.send_keys(Keys.ESCAPE)
    assert count.text == everything
    assert len(_shown(browser, "#tree .leaf")) == 14


def test_search_finds_a_layer_by_its_full_name(show):
    browser = show(sample_report())
    search = _find(browser, "#search")
    search.send_keys("layers.31.self_attn.o_proj")
    assert [text.split("\n")[0] for text in _shown(browser, "#tree .leaf")] == ["o_proj.weight"]
    search.clear()
    search.send_keys("layers.48.")
    assert not _shown(browser, "#tree .row:not(.heads)")
    assert "No parameter has this name." in _shown(browser, ".nothing")


def test_the_page_of_a_traced_plan(show):
    plan = ndcompile.plan(models.on_meta("qwen3_moe", num_hidden_layers=2), {"fsdp_size": 2, "tp_size": 2}, seq_len=64)
    browser = show(plan.report)
    assert browser.title == "Qwen3MoeForCausalLM: sharding plan"
    _find(browser, "#search").send_keys("k_norm")
    assert [text.split("\n")[0] for text in _shown(browser, "#tree .leaf")] == ["k_norm.weight"]


def test_the_tree_collapses_without_a_mouse_and_opens_for_a_hit(show):
    browser = show(sample_report())
    modules = browser.find_elements(By.CSS_SELECTOR, "#tree summary")
    attention = next(module for module in modules if module.text.startswith("self_attn"))
    _tab_to(browser, attention)
    attention.send_keys(Keys.ENTER)
    assert "q_proj.weight" not in "".join(_shown(browser, "#tree .leaf"))
    _find(browser, "#search").send_keys("q_proj")
    assert len(_shown(browser, "#tree .leaf")) == 1
    _find(browser, "#search").send_keys(Keys.ESCAPE)
    _find(browser, "#close-all").click()
    assert len(_shown(browser, "#tree .leaf")) == 1, "lm_head lies in no module"


def test_a_chosen_parameter_shows_its_slices(show):
    browser = show(sample_report())
    gate = next(e for e in browser.find_elements(By.CSS_SELECTOR, "#tree .leaf button") if e.text == "gate.weight")
    _tab_to(browser, gate)
    gate.send_keys(Keys.ENTER)
    assert _find(browser, "#slice-name").text == "model.layers.*.mlp.gate.weight"
    assert "4 slices, each on 2 ranks" in _find(browser, "#slice-about").text
    ranks = browser.find_elements(By.CSS_SELECTOR, "#slice-mesh .rank")
    _tab_to(browser, ranks[0])
    ranks[0].send_keys(Keys.ARROW_DOWN)
    ranks[2].send_keys(Keys.ENTER)
    assert _find(browser, "#rank-slice").text == "holds [64:96, :]: 32 × 2048, 128.0 KiB. So does rank 3."
    assert len(browser.find_elements(By.CSS_SELECTOR, "#slice-tensor .slice")) == 4


def test_an_axis_shows_who_talks_to_whom(show):
    browser = show(sample_report())
    _find(browser, "#mesh-picture [data-rank='3']").click()
    _find(browser, "#axis-choice [data-axis='ep']").click()
    assert _find(browser, "#mesh-caption").text == "ep: 2 groups of 4, one colour each. Rank 3 talks to 0–2."


def test_tables_sort_by_a_column(show):
    browser = show(sample_report())
    _find(browser, "#collective-table th:nth-child(5) button").click()
    counts = [int(e.text) for e in browser.find_elements(By.CSS_SELECTOR, "#collective-table tbody td:nth-child(5)")]
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp_replicate": 2, "tp": 3, "ep_rest": 2, "efsdp": 2},
        {"dp_replicate": 1, "tp": 2, "fsdp": 5},
        {"dp_replicate": 2, "tp": 1, "fsdp": 3},
    ],
    ids=lambda sizes: " ".join(f"{name}{size}" for name, size in sizes.items()),
)
def test_ranks_and_slices_are_those_of_the_library(show, sizes):
    """Every rank's ranges by the page's script and by `layout.py`, uneven and packed shards among them."""
    storage = {name: size for name, size in sizes.items() if size > 1}
    first = next(name for name in storage if name != "dp_replicate")
    shards = [
        {},
        dict.fromkeys(storage, "S(0)"),
        {first: "S(0) x 2"},
        {first: "S(1)"} | {"efsdp": "S(1)", "fsdp": "S(0)"},
    ]
    rows = [_placed({axis: given.get(axis, "R") for axis in storage}) for given in shards]
    browser = show(_on_mesh(sizes, storage, tuple(rows)))
    drawn = browser.execute_script(
        "return REPORT.parameters.map((row) => allRanks().map((rank) => slicesOf(row, rank)))"
    )
    for row, by_rank in zip(rows, drawn, strict=True):
        for rank, coordinate in _coordinates(sizes).items():
            held = intervals(
                row.shape,
                [_placement(row.placements[axis]) for axis in storage],
                list(storage.values()),
                [coordinate[axis] for axis in storage],
            )
            assert [[tuple(run) for run in runs] for runs in by_rank[rank]] == [list(runs) for runs in held]


def _on_mesh(sizes: dict[str, int], storage: dict[str, int], rows: tuple[ParameterRow, ...]) -> Report:
    fsdp = sizes.get("fsdp") or sizes["ep_rest"] * sizes["efsdp"]
    ep = sizes["tp"] * sizes["ep_rest"] if "ep_rest" in sizes else 1
    mesh = {"dp_replicate": sizes["dp_replicate"], "fsdp": fsdp, "tp": sizes["tp"], "ep": ep}
    return dataclasses.replace(sample_report(layers=2), mesh=mesh, storage=storage, parameters=rows)


def _placed(placements: dict[str, str]) -> ParameterRow:
    row = sample_report(layers=2).parameters[1]
    return dataclasses.replace(row, name=str(placements), shape=(22, 7), local_shape=(22, 7), placements=placements)


def _placement(text: str):
    dim, _, parts = text.removeprefix("S(").partition(")")
    if text == "R":
        return Replicate()
    return StridedShard(int(dim), split_factor=int(parts.removeprefix(" x "))) if parts else Shard(int(dim))


def _coordinates(sizes: dict[str, int]) -> dict[int, dict[str, int]]:
    """Rank -> place on the storage axes, by the permutation that `storage_mesh` makes."""
    rest = sizes.get("ep_rest", 1)
    minor = sizes.get("efsdp", sizes.get("fsdp", 1))
    ranks = torch.arange(prod(sizes.values())).reshape(sizes["dp_replicate"], minor, rest, sizes["tp"])
    ranks = ranks.permute(0, 3, 2, 1).reshape(list(sizes.values()))
    places = itertools.product(*map(range, sizes.values()))
    return {int(ranks[place]): dict(zip(sizes, place, strict=True)) for place in places}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_is_wider_than_the_window(show, width, scheme):
    browser = show(sample_report(), width, scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    dark = browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(19, 21, 25)"
    assert dark == (scheme == "dark")


def test_a_bare_plan_and_thousands_of_ranks_are_drawn(show):
    report = sample_report(layers=2)
    whole = tuple(dataclasses.replace(row, placements={}, local_shape=row.shape) for row in report.parameters)
    empty = dict.fromkeys(("boundaries", "collectives", "passes", "compute", "time", "critical_path"), ())
    one = dict.fromkeys(("dp_replicate", "fsdp", "tp", "ep"), 1)
    browser = show(dataclasses.replace(report, mesh=one, storage={}, parameters=whole, rates={}, **empty))
    assert "Whole on every rank" in _find(browser, "#slice-about").text
    assert _shown(browser, "main h2") == ["Mesh", "Memory of one rank", "Parameters", "Assumptions"]
    mesh = {"dp_replicate": 4, "fsdp": 64, "tp": 8, "ep": 64}
    storage = {"dp_replicate": 4, "tp": 8, "ep_rest": 8, "efsdp": 8}
    browser = show(dataclasses.replace(report, mesh=mesh, storage=storage))
    assert "2,048 ranks" in _find(browser, "#setting").text
    assert len(browser.find_elements(By.CSS_SELECTOR, "#mesh-picture .rank")) < 100


def test_a_screenshot_is_kept(show):
    browser = show(sample_report())
    SCREENSHOT.parent.mkdir(exist_ok=True)
    height = browser.execute_script("return document.documentElement.scrollHeight")
    window = {"width": 1400, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
    assert browser.save_screenshot(str(SCREENSHOT))
    assert SCREENSHOT.stat().st_size > 50_000
