"""What a person sees."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from grpocli.tracking.live import LiveView, clean, sparkline
from grpocli.tracking.view import PlainView, View, duration, number

METRICS = {"reward": 0.4123, "loss": -0.00012, "kl": 0.5, "time/step": 2.0, "weight_version": 3, "lr": 1e-6}


def test_plain_lines() -> None:
    out = io.StringIO()
    view = PlainView(Console(file=out, width=200))
    view.start("runs/x", ["sample 4"], total_steps=12)
    view.stage("loading")
    view.stage("loading")
    view.step(1, METRICS)
    view.note("[bold]kept as it is[/bold]")
    lines = out.getvalue().splitlines()
    assert lines[:3] == ["run runs/x", "  sample 4", "loading ..."]
    assert lines[3].startswith("step  1/12  reward 0.412  loss -1.20e-04  kl 0.500  seconds 2.000  0:2")
    assert lines[4] == "[bold]kept as it is[/bold]"


@pytest.mark.parametrize("size", [(80, 24), (120, 45), (40, 12)])
def test_the_live_view_fits_the_terminal(size: tuple[int, int]) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=size[0], height=size[1], color_system=None)
    view = LiveView(console)
    view.start("runs/x", ["sample 4"], total_steps=12)
    view.stage("warm start", 0.37)
    for step in range(1, 4):
        view.step(step, METRICS | {f"some/long/metric/name/{i}": 0.1 * step for i in range(30)})
        view.sample([{"role": "user", "content": "1+1="}], "\x1b[31m2", {"math": 1.0}, 0.5)
    view.stop()
    view.stop()
    drawn = io.StringIO()
    Console(file=drawn, width=size[0], height=size[1]).print(view._render())
    lines = drawn.getvalue().splitlines()
    assert len(lines) <= size[1]
    assert all(len(line) <= size[0] for line in lines)
    assert "\x1b[31m2" not in out.getvalue()
    assert "step 3/12" in drawn.getvalue()


def test_the_silent_view_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    view = View()
    view.start("x", ["y"], 3)
    view.step(1, METRICS)
    view.stop()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.4123, "0.412"), (123.456, "123.5"), (1e-6, "1.00e-06"), (0.0, "0"), (3, "3"), (None, "-"), (123456.0, "1.23e+05")],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_durations_and_sparklines() -> None:
    assert [duration(5), duration(185), duration(3723)] == ["0:05", "3:05", "1:02:03"]
    assert sparkline([0, 1, 2, 3], 10) == "▁▃▅█"
    assert len(sparkline(list(range(100)), 10)) == 10
    assert clean("a\x1b[2Jb\x07\nc") == "a[2Jb\nc"
