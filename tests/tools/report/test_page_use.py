"""The page as it is used: zoom, colours of tokens, turns, paper, narrow windows, dark mode, less motion."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from report.conftest import wait_until
from report.pages import completion, page, run, shown, sweep

from grpocli_tools.report.page_data import Chart, ChartLine, PageData

pytestmark = pytest.mark.browser

Show = Callable[..., Any]
TABS = ("curves", "rollouts", "results", "wall")


@pytest.fixture
def media(chromium: Any) -> Iterator[Callable[..., None]]:
    """Sets the medium and its features until the test ends."""

    def emulate(medium: str = "", **features: str) -> None:
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": medium, "features": listed})

    yield emulate
    emulate()


@pytest.mark.parametrize(
    ("measure", "ends", "colored"),
    [
        ("none", None, 0),
        ("logp", ("≤ −5: unlikely", "0: certain"), 6),
        ("entropy", ("≥ 2: undecided", "0: certain"), 6),
        ("ratio", ("≤ 0.74: less likely now", "≥ 1.35: more likely now"), 6),
        ("mismatch", ("≤ −0.2", "≥ 0.2"), 5),
        ("advantage", ("≤ −2: made less likely", "≥ 2: made more likely"), 7),
    ],
)
def test_each_measure_colors_the_tokens_and_has_a_legend(
    show: Show, measure: str, ends: tuple[str, str] | None, colored: int
) -> None:
    view = run(steps=2, rollouts=shown(completion("a b c d e f g h")))
    browser = show(page(view), f"#tab=rollouts&color={measure}&marks=1")
    tokens = browser.find_elements("css selector", ".token[data-token]")
    assert len(tokens) == 8
    backgrounds = [token.value_of_css_property("background-color") for token in tokens]
    assert sum(color != "rgba(0, 0, 0, 0)" for color in backgrounds) == colored
    legend = browser.find_elements("css selector", ".legend:has(.ramp)")
    assert [(one.text.splitlines()[0], one.text.splitlines()[-1]) for one in legend] == ([ends] if ends else [])


def test_an_episode_is_shown_as_turns(show: Show) -> None:
    turns = [
        {"role": "assistant", "content": "2+2="},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    view = run(steps=2, rollouts=shown(completion("2+2= 4 It is 4.", episode=turns, mask=[1, 0, 1, 1, 1])))
    browser = show(page(view), "#tab=rollouts")
    found = browser.find_elements("css selector", ".completion .turn")
    assert [one.text.split("\n") for one in found] == [[turn["role"], turn["content"]] for turn in turns]
    browser.find_element("css selector", '[data-control="measure"] [value="logp"]').click()
    starts = browser.find_elements("css selector", ".token.turn")
    assert [int(one.get_attribute("data-token")) for one in starts] == [1, 2]


def serious(browser: Any) -> list[Any]:
    from axe_core_python.selenium import Axe

    found = Axe().run(browser)["violations"]
    return [(one["id"], one["nodes"][0]["html"][:200]) for one in found if one["impact"] in ("serious", "critical")]


@pytest.mark.parametrize("tab", TABS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_a_sweep(show: Show, tab: str, scheme: str) -> None:
    browser = show(sweep(4, 2, 10), f"#tab={tab}", scheme=scheme)
    browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
    found = serious(browser)
    assert found == [], json.dumps(found, indent=1)


def with_long_words() -> PageData:
    """A page with words that are wider than a phone."""
    word = "rollout.max_completion_tokens/" * 8
    view = run(steps=20, facts=[("model", word), ("lengths", f"rollout.x={word}")], overrides=[word], path=word)
    rollouts = shown(completion(word), completion(word, tokens=None, mask=None))
    return page(replace(view, rollouts=rollouts), title=word, notes=[word])


@pytest.mark.parametrize("tab", TABS)
@pytest.mark.parametrize("data", [with_long_words(), sweep(3, 2, 20)], ids=["long words", "sweep"])
def test_nothing_is_wider_than_a_window_of_360_pixels(show: Show, data: PageData, tab: str) -> None:
    browser = show(data, f"#tab={tab}", 360)
    browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
    assert browser.execute_script("return innerWidth") == 360
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360


def test_charts_that_never_change_are_one_line_with_their_numbers(show: Show) -> None:
    view = run(steps=20)
    view.metrics["rewards/math/errors"] = [0.0] * 20
    view.metrics["lr"] = [5e-4] * 20
    added = [
        Chart("errors", "Scoring errors", "Learning", [ChartLine("rewards/math/errors", "math")]),
        Chart("lr", "Learning rate", "Update", [ChartLine("lr", "lr")]),
    ]
    data = page(view)
    browser = show(replace(data, charts=[*data.charts, *added]), "#tab=curves")
    line = browser.find_element("css selector", ".constant > summary")
    assert line.text == "Constant: Scoring errors 0 · Learning rate 0.0005"
    assert not browser.find_element("id", "chart-lr").is_displayed()
    line.click()
    assert browser.find_element("id", "chart-lr").is_displayed()
    wait_until(lambda: browser.find_elements("css selector", "#chart-lr canvas"))


def test_a_killed_run_says_so_with_a_command_as_text(show: Show) -> None:
    command = "grpocli train 'resume=/runs/<b>x</b>'"
    view = run(state="unfinished", notice="The run was <i>killed</i>.", resume=command)
    notice = show(page(view)).find_element("css selector", "#header .notice")
    assert notice.find_element("css selector", "p").text == "The run was <i>killed</i>."
    assert notice.find_element("css selector", "code").text == command
    assert notice.find_elements("css selector", "b, i") == []
    assert show(page()).find_elements("css selector", ".notice") == []


def test_paper_has_every_chart_and_at_most_eight_completions(show: Show, media: Callable[..., None]) -> None:
    rollouts = shown(*(completion(reward=float(at % 2)) for at in range(16)))
    browser = show(page(run(rollouts=rollouts)), "#tab=rollouts", scheme="dark")
    media("print", prefers_color_scheme="dark")
    wait_until(lambda: browser.find_element("id", "panel-curves").is_displayed())
    charts = browser.find_elements("css selector", ".chart")
    drawn = [chart.find_elements("tag name", "canvas") for chart in charts]
    assert [len(canvas) for canvas in drawn] == [1] * 5
    assert all(chart.is_displayed() for chart in charts)
    assert sum(one.is_displayed() for one in browser.find_elements("css selector", ".completion")) == 8
    assert browser.find_element("css selector", ".printed-note").text == "Printed: 8 of 16 completions."
    assert not any(one.is_displayed() for one in browser.find_elements("css selector", "#list, button, select"))
    assert browser.execute_script("return document.documentElement.dataset.theme") == "light"
    media("screen", prefers_color_scheme="dark")
    wait_until(lambda: not browser.find_element("id", "panel-curves").is_displayed())
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
