"""`grpocli compare --plot`: pictures of the curves of several runs."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from report.test_compare import run

from grpocli.errors import ConfigError
from grpocli_tools.report.compare_command import main, mean_and_range, smoothed

SUFFIXES = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two learning rates with two seeds; only the second learning rate has the metric `extra`."""
    for number, (lr, seed) in enumerate([(0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1)]):
        folder = tmp_path / "sweep" / str(number)
        run(folder, "grpo", seed, 0.75, lr)
        extra = {"extra_$x$": 0.5} if lr > 0.1 else {}
        lines = [json.dumps({"step": step, "reward": lr * step + seed, **extra}) for step in (1, 2, 3)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "sweep"


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_same_curves_give_the_same_picture(sweep: Path, tmp_path: Path, suffix: str) -> None:
    pictures = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for picture in pictures:
        assert main([str(sweep), "--plot", str(picture), "--metric", "reward,eval/accuracy"]) == 0
    first, second = (picture.read_bytes() for picture in pictures)
    assert first.startswith(SUFFIXES[suffix])
    assert first == second


def test_a_picture_names_runs_metrics_and_the_band(sweep: Path, tmp_path: Path, capsys) -> None:
    assert main([str(sweep), "--plot", str(tmp_path / "p.svg"), "--metric", "reward,extra_$x$"]) == 0
    texts = {
        "".join(text.itertext()).strip()
        for text in ET.parse(tmp_path / "p.svg").iter("{http://www.w3.org/2000/svg}text")
    }
    assert {"step", "reward", "extra_$x$", "lr=0.1", "lr=0.2", "mean of 2 seeds; band: minimum to maximum"} <= texts
    assert "without extra_$x$: 0, 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--plot", "p.odt"], "--plot=p.odt: "),
        (["--plot", "p.png", "--metric", "rewad"], 'no run has this metric; did you mean "reward"?'),
        (["--plot", "p.png", "--smoothing", "1"], "--smoothing=1.0: must be 0 (none) to below 1"),
        (["--plot", "folder.png"], "--plot=folder.png: "),
    ],
)
def test_wrong_options_are_one_sentence(
    sweep: Path, options: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError) as error:
        main([str(sweep), *options])
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_smoothing_has_no_bias_at_the_start() -> None:
    constant = [(step, 2.0) for step in range(1, 21)]
    assert smoothed(constant, 0.9) == [(step, pytest.approx(2)) for step, _ in constant]
    rising = [(step, float(step)) for step in range(1, 21)]
    assert smoothed(rising, 0.5)[:2] == [(1, 1.0), (2, pytest.approx((0.25 * 1 + 0.5 * 2) / 0.75))]


@pytest.mark.browser
def test_the_page_smooths_and_averages_as_the_picture(chromium: Any) -> None:
    """Two seeds, the second of which ends early and has a gap; and too few values to smooth."""
    page = files("grpocli_tools.report").joinpath("page")
    is_number = next(line for line in (page / "dom.js").read_text().splitlines() if line.startswith("const isNumber"))
    code = (
        f"{is_number}\n{(page / 'series.js').read_text()}\nconst lines = arguments[0].map((one) => smooth(one, 0.6));"
    )
    for steps in (40, 19):
        seeds = [
            [math.sin(step) for step in range(steps)],
            [None if step == 7 or step > steps - 5 else math.cos(step) for step in range(steps)],
        ]
        found = chromium.execute_script(f"{code}\nreturn meanAndBand(lines, 'range')", seeds)
        pairs = [[(step, value) for step, value in enumerate(seed) if value is not None] for seed in seeds]
        expected = mean_and_range([smoothed(pair, 0.6) for pair in pairs])
        shown = [(step, *(found[name][step] for name in ("mean", "low", "high"))) for step in range(steps)]
        assert shown == [pytest.approx(point) for point in expected]
