"""The page as it is used: zoom, colours of tokens, turns, paper, narrow windows, dark mode, less motion."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from report.conftest import wait_until
from report.pages import completion, page, run, sweep

from grpocli_tools.report.page_data import Chart, ChartLine, GroupView, PageData, PageTable, RolloutSelection, Verdict

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


def zoom_of(browser: Any) -> tuple[int, int] | None:
    _, found, steps = browser.current_url.partition("zoom=")
    if not found:
        return None
    first, last = steps.partition("&")[0].split("-")
    return int(first), int(last)


def drag(browser: Any, chart: str) -> None:
    """Drags over the middle half of a chart."""
    from selenium.webdriver import ActionChains

    over = browser.find_element("css selector", f"#chart-{chart} .u-over")
    quarter = over.size["width"] // 4
    actions = ActionChains(browser).move_to_element_with_offset(over, -quarter, 0).click_and_hold()
    actions.move_by_offset(quarter, 5).move_by_offset(quarter, 0).release().perform()


def test_a_drag_zooms_all_charts_to_its_steps_and_the_button_shows_all_again(show: Show) -> None:
    browser = show(page(), "#tab=curves")
    reset = browser.find_element("id", "reset-zoom")
    assert not reset.is_enabled()
    drag(browser, "reward")
    wait_until(lambda: zoom_of(browser) is not None)
    first, last = zoom_of(browser) or (0, 0)
    assert abs(first - 15) <= 2
    assert abs(last - 45) <= 2
    area = browser.find_element("css selector", "#chart-entropy .plot")
    browser.execute_script("arguments[0].scrollIntoView()", area)
    outside = "return document.querySelector('#chart-entropy .u-cursor-x').style.transform"
    area.send_keys("\ue011")  # Home: step 1 is outside
    assert "-10px" in browser.execute_script(outside)
    assert reset.is_enabled()
    browser.execute_script("scrollTo(0, 0)")
    reset.click()
    wait_until(lambda: zoom_of(browser) is None)
    assert not reset.is_enabled()


def test_plus_minus_and_escape_zoom_with_the_keyboard(show: Show) -> None:
    browser = show(page(), "#tab=curves&step=30")
    area = browser.find_element("css selector", "#chart-reward .plot")
    area.send_keys("+")
    wait_until(lambda: zoom_of(browser) == (16, 45))
    area.send_keys("-")
    wait_until(lambda: zoom_of(browser) is None)
    area.send_keys("++")
    wait_until(lambda: zoom_of(browser) is not None)
    area.send_keys("\ue00c")
    wait_until(lambda: zoom_of(browser) is None)


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
    shown = completion("a b c d e f g h")
    view = run(steps=2, rollouts=RolloutSelection("", 1, [1], [GroupView(1, 0, "0", 0, [shown])]))
    browser = show(page(view), f"#tab=rollouts&color={measure}&marks=1")
    tokens = browser.find_elements("css selector", ".token[data-token]")
    assert len(tokens) == 8
    backgrounds = [token.value_of_css_property("background-color") for token in tokens]
    assert sum(color != "rgba(0, 0, 0, 0)" for color in backgrounds) == colored
    legend = browser.find_elements("css selector", ".legend:has(.ramp)")
    assert [(one.text.splitlines()[0], one.text.splitlines()[-1]) for one in legend] == ([ends] if ends else [])


def test_clipped_and_masked_tokens_are_marked_and_explained(show: Show) -> None:
    shown = completion("a b c d e f g h i j k l")
    view = run(steps=2, rollouts=RolloutSelection("", 1, [1], [GroupView(1, 0, "0", 0, [shown])]))
    browser = show(page(view), "#tab=rollouts&color=logp")
    for kind, expected in (("clipped", [10]), ("masked", [6])):
        tokens = browser.find_elements("css selector", f".token.{kind}[data-token]")
        assert [int(token.get_attribute("data-token")) for token in tokens] == expected
        assert browser.find_element("css selector", f".legend .{kind}").is_displayed()
    area = browser.find_element("css selector", ".tokens")
    area.send_keys("\ue014" * 11)  # arrow right
    values = browser.find_element("css selector", ".token-values").text
    assert "token 11" in values
    assert "clipped" in values


def test_an_episode_is_shown_as_turns(show: Show) -> None:
    turns = [
        {"role": "assistant", "content": "2+2="},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    shown = completion("2+2= 4 It is 4.", episode=turns, mask=[1, 0, 1, 1, 1])
    view = run(steps=2, rollouts=RolloutSelection("", 1, [1], [GroupView(1, 0, "0", 0, [shown])]))
    browser = show(page(view), "#tab=rollouts")
    found = browser.find_elements("css selector", ".completion .turn")
    assert [one.text.split("\n") for one in found] == [[turn["role"], turn["content"]] for turn in turns]
    browser.find_element("css selector", '[data-control="measure"] [value="logp"]').click()
    starts = browser.find_elements("css selector", ".token.turn")
    assert [int(one.get_attribute("data-token")) for one in starts] == [1, 2]


def test_paper_has_every_chart_and_at_most_eight_completions(show: Show, media: Callable[..., None]) -> None:
    group = GroupView(1, 0, "0", 0, [completion(reward=float(at % 2)) for at in range(16)])
    browser = show(page(run(rollouts=RolloutSelection("", 16, [1], [group]))), "#tab=rollouts", scheme="dark")
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


def test_a_pdf_has_the_charts_and_the_page_returns_to_its_tab(show: Show) -> None:
    browser = show(page(), "#tab=rollouts")
    made = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert made.startswith(b"%PDF")
    assert len(browser.find_elements("css selector", "#panel-curves canvas")) == 5
    assert browser.find_element("id", "panel-rollouts").is_displayed()
    wait_until(lambda: not browser.find_element("id", "panel-curves").is_displayed())


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
    group = GroupView(1, 0, "0", 0, [completion(word), completion(word, tokens=None, mask=None)])
    return page(replace(view, rollouts=RolloutSelection("", 2, [1], [group])), title=word, notes=[word])


@pytest.mark.parametrize("tab", TABS)
@pytest.mark.parametrize("data", [with_long_words(), sweep(3, 2, 20)], ids=["long words", "sweep"])
def test_nothing_is_wider_than_a_window_of_360_pixels(show: Show, data: PageData, tab: str) -> None:
    browser = show(data, f"#tab={tab}", 360)
    browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
    assert browser.execute_script("return innerWidth") == 360
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360


def test_nothing_moves_for_readers_who_asked_for_less_motion(show: Show, media: Callable[..., None]) -> None:
    browser = show(page(), "#tab=curves")
    moving = (
        "return [...document.querySelectorAll('*')].filter((one) => {"
        "const style = getComputedStyle(one);"
        "return !/^(0s(, )?)+$/.test(style.transitionDuration) || style.animationName !== 'none'; }).length"
    )
    assert browser.execute_script(moving) > 0
    media(prefers_reduced_motion="reduce")
    assert browser.execute_script(moving) == 0


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


def test_a_chart_with_a_warning_is_not_folded(show: Show) -> None:
    view = run(steps=20)
    view.metrics["entropy"] = [0.0] * 20
    browser = show(page(view), "#tab=curves")
    assert browser.find_elements("css selector", ".constant") == []
    browser.find_element("css selector", '[data-warning="entropy"]').click()
    assert browser.switch_to.active_element.get_attribute("aria-label") == "Entropy: step cursor"


def test_runs_with_one_rule_of_sampling_share_its_sentence(show: Show) -> None:
    data = sweep(2, 2, 10)
    rules = ["1,100 of 2,000 completions: the first", "50 of 60 completions: the first", "", "all of step 1"]
    runs = [
        replace(view, rollouts=replace(view.rollouts, rule=rule)) for view, rule in zip(data.runs, rules, strict=True)
    ]
    browser = show(replace(data, runs=runs), "#tab=rollouts")
    shown = [one.text for one in browser.find_elements("css selector", ".rule")]
    assert shown == ["1,150 of 2,060 completions: the first", "all of step 1"]


def test_a_killed_run_says_so_with_a_command_as_text(show: Show) -> None:
    command = "grpocli train 'resume=/runs/<b>x</b>'"
    view = run(state="unfinished", notice="The run was <i>killed</i>.", resume=command)
    notice = show(page(view)).find_element("css selector", "#header .notice")
    assert notice.find_element("css selector", "p").text == "The run was <i>killed</i>."
    assert notice.find_element("css selector", "code").text == command
    assert notice.find_elements("css selector", "b, i") == []
    assert show(page()).find_elements("css selector", ".notice") == []


def test_the_start_of_a_session_is_marked_in_the_curves(show: Show) -> None:
    def drawn(*starts: int) -> tuple[str, list[str]]:
        browser = show(page(run(starts=list(starts))), "#tab=curves&step=5")
        picture = "return document.querySelector('#chart-reward canvas').toDataURL()"
        wait_until(lambda: browser.find_elements("css selector", "#chart-reward canvas"))
        return browser.execute_script(picture), [one.text for one in browser.find_elements("css selector", ".starts")]

    (plain, none), (marked, note), (outside, nothing) = drawn(), drawn(30), drawn(60)
    assert (note, none, nothing) == (["Dashed line: the run was resumed after step 30."], [], [])
    assert marked != plain == outside


def test_verdicts_of_several_runs_are_counted_by_their_words(show: Show) -> None:
    words = [("good", "reward rose"), ("bad", "got worse"), ("good", "learned"), ("good", "learned")]
    runs = [run(str(at), verdict=Verdict(level, word, "")) for at, (level, word) in enumerate(words)]
    counted = show(page(*runs)).find_element("css selector", "#header .verdict").text
    assert counted == "4 runs: 1 reward rose, 2 learned, 1 got worse"


def test_the_numbers_of_a_column_have_at_most_four_digits_of_its_largest(show: Show) -> None:
    table = PageTable(["run", "a", "b"], [["x", 0.4140625, 0.01234567], ["y", 0.01953125, 0.05]])
    browser = show(replace(page(run("x"), run("y")), results=table), "#tab=results")
    cells = browser.find_elements("css selector", "#panel-results table:first-of-type tbody td")
    assert [cell.text for cell in cells[:4]] == ["0.4141", "0.01235", "0.0195", "0.05000"]
