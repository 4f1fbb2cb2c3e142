"""The page of a real run in a browser: its numbers are those of metrics.jsonl, its completions those of the Parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from cli.running import run_here

from grpocli_tools.report.build_page import Builder
from grpocli_tools.report.page_data import PageData

pytestmark = [pytest.mark.browser, pytest.mark.processes, pytest.mark.survival]

STEPS = 4
Show = Callable[..., Any]
Data = tuple[Path, PageData]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Data:
    """A run of four steps, with completions that are cut off, and its page."""
    run = tmp_path_factory.mktemp("real") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPOCLI_CACHE", str(shared_cache))
        options = [f"train.steps={STEPS}", "eval.problems=16", "rollout.max_completion_tokens=4"]
        assert run_here("train", *options, f"hydra.run.dir={run}") == 0
    return run, Builder(lambda run: ["J"]).page([run])


def logged(run: Path) -> dict[int, dict[str, float]]:
    """{step: metrics} of metrics.jsonl."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows}


def shown_values(browser: Any, chart: str = "") -> dict[str, str]:
    """{metric: number} of the charts: the text of the one in use, which has every digit; of all others the title."""
    number = "textContent" if chart else "title"
    return dict(
        browser.execute_script(
            f"return [...document.querySelectorAll('{chart} dd[data-metric]')]"
            f".map((one) => [one.dataset.metric, one.{number}])"
        )
    )


def frame(browser: Any) -> None:
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def test_the_arrow_keys_show_each_metric_of_each_step_to_the_last_digit(show: Show, trained: Data) -> None:
    from selenium.webdriver import Keys

    run, data = trained
    browser = show(data, "#tab=curves")
    area = browser.find_element("css selector", "#chart-reward .plot")
    for step, row in logged(run).items():
        area.send_keys(Keys.HOME, *[Keys.ARROW_RIGHT] * data.runs[0].steps.index(step))
        assert int(area.get_attribute("aria-valuenow")) == step
        shown = shown_values(browser)
        of_the_step = {name: text for name, text in shown.items() if name in row and text != "–"}
        assert len(of_the_step) >= 20
        assert {name: float(text) for name, text in of_the_step.items()} == {name: row[name] for name in of_the_step}
        assert [name for name, text in shown.items() if text == "–" and name in row] == []
        assert float(shown_values(browser, "#chart-reward")["reward"]) == row["reward"]


def test_the_mouse_shows_the_reward_of_each_step_to_the_last_digit(show: Show, trained: Data) -> None:
    from selenium.webdriver import ActionChains

    run, data = trained
    browser = show(data, "#tab=curves")
    area = browser.find_element("css selector", "#chart-reward .plot")
    over = browser.find_element("css selector", "#chart-reward .u-over")
    rows, width, steps = logged(run), over.size["width"], data.runs[0].steps
    seen = set()
    for at in range(0, width - 4, width // 12):
        ActionChains(browser).move_to_element_with_offset(over, at + 2 - width // 2, 0).perform()
        frame(browser)
        step = int(area.get_attribute("aria-valuenow"))
        if "reward" in rows.get(step, {}):
            assert float(shown_values(browser, "#chart-reward")["reward"]) == rows[step]["reward"]
            seen.add(step)
    assert seen == {step for step in steps if step > 0}


@pytest.mark.parametrize(
    ("address", "condition"),
    [
        ("", pc.field("step") >= 1),
        ("from=2&to=3", (pc.field("step") >= 2) & (pc.field("step") <= 3)),
        ("adv=positive", pc.field("advantage") > 0),
        ("adv=negative", pc.field("advantage") < 0),
        ("adv=zero", pc.field("advantage") == 0),
        ("finish=length", pc.field("finish_reason") == "length"),
        ("status=trained", pc.field("status") == "trained"),
        ("min.exact_match=1", pc.field("reward/exact_match") >= 1),
        ("max.exact_match=0.5&from=4", (pc.field("reward/exact_match") <= 0.5) & (pc.field("step") >= 4)),
        ("q=12", pc.match_substring(pc.field("prompt"), "12") | pc.match_substring(pc.field("completion"), "12")),
    ],
)
def test_a_filter_finds_as_many_completions_as_the_parquet_has(
    show: Show, trained: Data, address: str, condition: Any
) -> None:
    run, data = trained
    expected = pq.read_table(run / "rollouts", filters=condition).num_rows
    found = show(data, f"#tab=rollouts&{address}").find_element("id", "found")
    assert int(found.get_attribute("data-count")) == expected > 0


def test_an_open_group_has_the_texts_and_numbers_of_the_parquet(show: Show, trained: Data) -> None:
    run, data = trained
    rows = pq.read_table(run / "rollouts/step_000003.parquet", filters=pc.field("group") == 5).to_pylist()
    browser = show(data, f"#tab=rollouts&color=none&group={data.runs[0].id}~3~5")
    cards = browser.find_elements("css selector", "#group .completion")
    shown = {int(card.get_attribute("data-completion")): card for card in cards}
    assert len(shown) == len(rows) > 1
    for at, row in enumerate(rows):
        assert shown[at].find_element("css selector", ".text").text == row["completion"].strip()
        assert float(shown[at].find_element("css selector", '[data-number="reward"]').text) == row["reward"]
    assert browser.find_element("css selector", "#group .answer").text == rows[0]["answer"]


def test_a_saved_csv_has_the_numbers_of_metrics_jsonl(show: Show, trained: Data, downloads: Any) -> None:
    run, data = trained
    browser = show(data, "#tab=curves")
    saved = downloads(lambda: browser.find_element("css selector", "#chart-reward .chart-foot button").click())
    rows = list(csv.DictReader(saved.read_text().splitlines()))
    expected = {str(step): row["reward"] for step, row in logged(run).items() if "reward" in row}
    assert {row["step"]: float(row["reward"]) for row in rows} == expected
    assert {row["run"] for row in rows} == {data.runs[0].name}


def test_all_curves_as_csv_have_each_number_of_the_page(show: Show, trained: Data, downloads: Any) -> None:
    run, data = trained
    browser = show(data, "#tab=curves")
    saved = downloads(lambda: browser.find_element("id", "save-all").click())
    rows = {int(row["step"]): row for row in csv.DictReader(saved.read_text().splitlines())}
    for step, row in logged(run).items():
        assert {name: float(text) for name, text in rows[step].items() if text and name in row} == {
            name: value for name, value in row.items() if name in rows[step]
        }
