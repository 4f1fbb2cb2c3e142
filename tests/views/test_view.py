"""Views: plain lines, the live view, and formatted text."""

from __future__ import annotations

import io
import math
import re
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from grpocli.text import clean, prompt_text
from grpocli.views.live_view import LiveView, make_view
from grpocli.views.view import PlainView, ShownCompletion, Stage, View

METRICS: dict[str, Any] = {"reward": 0.4123, "loss": -0.00012, "kl": 0.5, "completions/mean_length": 3.25}
METRICS |= {"time/step": 2.0, "weight_version": 3, "lr": 1e-6, "rewards/format/mean": math.nan}


def plain() -> tuple[PlainView, io.StringIO, SimpleNamespace]:
    """A view, what it writes, and its clock, which the test sets."""
    out, clock = io.StringIO(), SimpleNamespace(now=100.0)
    return PlainView(Console(file=out, width=200), lambda: clock.now), out, clock


def test_plain_lines_show_the_metrics() -> None:
    view, out, _ = plain()
    view.start("runs/x", ["sample 4"], total_steps=12)
    view.stage("loading")
    view.step(1, METRICS)
    view.note("[bold]kept as it is[/bold] \x1b[31m:smile:")
    view.warn("look out")
    assert out.getvalue().splitlines() == [
        "run runs/x",
        "  sample 4",
        "loading ...",
        "step  1/12  reward 0.412  loss -1.2e-04  kl 0.500  length 3.250  2 s/step  22 s left",
        "[bold]kept as it is[/bold] :smile:",
        "warning: look out",
    ]


def test_plain_stages_are_printed_once_and_slow_ones_repeatedly() -> None:
    view, out, clock = plain()
    for _ in range(3):
        view.stage("training")
    for percent in range(0, 100, 10):
        view.stage(f"warm start, step {percent} of 100", percent / 100)
        view.tick()
        clock.now += 2
    assert out.getvalue().splitlines() == [
        "training ...",
        "warm start ...",
        "warm start, step 50 of 100 ... 50%, 10 s left, 10 s so far",
    ]


def test_a_late_report_does_not_restore_the_earlier_stage() -> None:
    others: list[threading.Thread] = []

    def clock() -> float:
        """Changes the stage while a report reads it."""
        if current and not others:
            others.append(threading.Thread(target=current[0].begin, args=("training",)))
            others[0].start()
            others[0].join(0.1)  # with the lock, this waits for the report
        return 0.0

    current: list[Stage] = []
    current.append(Stage(clock, "evaluating"))
    current[0].progress(1, 2, "completions")
    others[0].join()
    assert (current[0].text, str(current[0])) == ("training", "")


def test_plain_samples_are_printed_rarely_and_on_one_line() -> None:
    view, out, clock = plain()
    for _ in range(3):
        view.sample(ShownCompletion("1+\n1=", "2\x1b[2J" + "x" * 100, {"math": 1.0, "format": math.nan}, -0.5))
        clock.now += 20
    clock.now += 20
    view.sample(ShownCompletion("1+1=", "3", {"math": 0.0}, -0.5, "2\x1b[2J\n"))
    (first, second, third) = out.getvalue().splitlines()
    assert first == second == f'  "1+ 1=" -> "...{"x" * 60}"  math 1  format -  advantage -0.500'
    assert third == '  "1+1=" -> "3"  reference "2"  math 0  advantage -0.500'


def screen(view: LiveView, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(view)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def live() -> Iterator[LiveView]:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=40, color_system=None)
    view = LiveView(console)
    yield view
    view.stop()


def fill(view: LiveView, steps: int = 3, completion: str = "2") -> None:
    view.start("day/time", ["sample 4"], total_steps=12)
    view.stage("warm start", 0.37)
    for step in range(1, steps + 1):
        view.step(step, METRICS | {f"some/long/metric/name/{i}": 0.1 * step for i in range(30)})
        view.sample(
            ShownCompletion([{"role": "user", "content": "[red]1+1[/red]=" * 50}], completion, {"math": 1.0}, 0.5, "2")
        )


@pytest.mark.parametrize(("width", "height"), [(20, 24), (40, 3), (50, 100), (81, 10), (250, 20)])
def test_the_live_view_fits_the_terminal(live: LiveView, width: int, height: int) -> None:
    fill(live, completion="数学" * 500 + "\n\\boxed{46}\n")
    lines = screen(live, width, height)
    assert len(lines) < max(height, 4)
    assert all(cell_len(line) <= width for line in lines)
    if width >= 40:
        assert any("step  3/12" in line for line in lines)
    assert any("warm start" in line for line in lines)


def test_the_live_view_shows_metrics_progress_and_a_completion(live: LiveView) -> None:
    live.stage("loading")
    assert any("loading" in line for line in screen(live, 80, 24))
    fill(live, completion="\x1b[31mso it is\n[bold]2[/bold]\x07")
    text = "\n".join(screen(live, 100, 40))
    for said in ("day/time", "step  3/12", "2 s/step", "warm start  0 s  37%", "0.412", "3 ", "advantage 0.500"):
        assert said in text
    assert "[bold]2[/bold]" in text
    assert "[red]1+1[/red]=" in text
    assert "\x1b[31m" not in text
    assert re.search(r"1\d s left", text)
    assert re.search(r"some/long/metric/name/2 +0\.300 ↑", text)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), st.none() | st.floats() | st.integers() | st.text()), st.text(), st.text())
def test_any_metrics_and_texts_are_drawn(metrics: dict[str, Any], prompt: str, completion: str) -> None:
    view = LiveView(Console(file=io.StringIO(), force_terminal=True, width=80, height=24))
    try:
        view.step(1, metrics)
        view.sample(ShownCompletion(prompt, completion, {"r": math.nan}, math.inf))
        lines = screen(view, 80, 24)
    finally:
        view.stop()
    assert len(lines) < 24


def test_the_terminal_is_restored_after_an_error() -> None:
    out = io.StringIO()
    stdout = sys.stdout
    view = LiveView(Console(file=out, force_terminal=True, width=80, height=24))
    assert sys.stdout is not stdout
    fill(view)
    view.stop()
    view.stop()
    assert sys.stdout is stdout
    assert [out.getvalue().count(f"\x1b[?25{state}") for state in "lh"] == [1, 1], (
        "the cursor is hidden and shown again"
    )
    assert "stopped" in out.getvalue()


@pytest.mark.parametrize(("term", "kind"), [("xterm-256color", LiveView), ("dumb", PlainView)])
def test_a_terminal_that_cannot_be_redrawn_gets_lines(
    monkeypatch: pytest.MonkeyPatch, term: str, kind: type[View]
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert type(make_view()) is PlainView  # a test's output is not a terminal, even with FORCE_COLOR
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    view = make_view()
    view.stop()
    assert type(view) is kind


def test_a_full_disk_below_standard_output_does_not_end_a_run(caplog: pytest.LogCaptureFixture) -> None:
    with open("/dev/full", "w") as file:  # noqa: PTH123 - a device
        view = PlainView(Console(file=file, force_terminal=False))
        view.note("one")
        view.note("two")
    assert "standard output cannot be written (No space left on device): the run goes on" in caplog.text
    assert len(caplog.records) == 1


def test_text_of_models_cannot_control_the_terminal() -> None:
    assert clean("a\x1b[2Jb\x07\r\nc\x1b]0;title\x07d\te") == "ab\ncd  e"
    assert clean("\u202eright to left\u200b \x9b31m") == "right to left 31m"
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]
    assert prompt_text(talk) == "user: hi\nassistant: "
