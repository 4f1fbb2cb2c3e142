"""The page of a real run in a browser: its numbers are those of metrics.jsonl, its completions those of the Parquet."""

from __future__ import annotations

import csv
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from cli.running import SMALL, metrics, run_here
from report.conftest import wait_until

from grpocli_tools.report.build_page import Builder
from grpocli_tools.report.page_data import PageData

pytestmark = [pytest.mark.browser, pytest.mark.processes, pytest.mark.survival]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PageData]:
    """A run of four steps, with completions that are cut off, and its page."""
    run = tmp_path_factory.mktemp("real") / "run"
    options = [*SMALL, "train.steps=4", "rollout.prompts_per_step=8", "rollout.max_completion_tokens=4"]
    assert run_here("train", *options, f"hydra.run.dir={run}") == 0
    return run, Builder(lambda run: ["J"]).page([run])


def test_an_open_group_has_the_texts_and_numbers_of_the_parquet(show, trained) -> None:
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


def test_all_curves_as_csv_have_each_number_of_the_page(show, trained, tmp_path: Path) -> None:
    run, data = trained
    browser = show(data, "#tab=curves")
    here = {"behavior": "allow", "downloadPath": str(tmp_path), "eventsEnabled": False}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", here)
    browser.find_element("id", "save-all").click()
    wait_until(lambda: list(tmp_path.glob("*.csv")))
    (saved,) = tmp_path.glob("*.csv")
    rows = {int(row["step"]): row for row in csv.DictReader(saved.read_text().splitlines())}
    for row in metrics(run):
        assert {name: float(text) for name, text in rows[row["step"]].items() if text and name in row} == {
            name: value for name, value in row.items() if name in rows[row["step"]]
        }
