"""The page in a real browser: no request, exact numbers, filters, hostile text, keyboard, paper, phones, dark mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from report.conftest import wait_until
from report.pages import completion, page, prompt, run, shown, sweep

from grpocli_tools.report.page_data import Chart, ChartLine, GroupView, PageData, PromptText, RolloutSelection

pytestmark = pytest.mark.browser

Show = Callable[..., Any]
HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 1">',
    "a\x00b\x07c\x1b[31m\x7f\x85",
    "left \u202eright\u2066 \u200f\u061c",
    "\u2028\u2029\ufeff\udc00",
    "&lt;b&gt;<!--",
]


def errors(browser: Any) -> list[str]:
    return [line["message"] for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]


@pytest.mark.parametrize("tab", ["", "#tab=results", "#tab=curves", "#tab=wall", "#tab=rollouts"])
@pytest.mark.parametrize("data", [page(), sweep()], ids=["one", "sweep"])
def test_it_loads_without_an_error_or_a_request(show: Show, data: Any, tab: str) -> None:
    browser = show(data, tab)
    assert browser.find_element("css selector", "h1").text == data.title
    assert errors(browser) == []
    assert browser.execute_script('return performance.getEntriesByType("resource").map((entry) => entry.name)') == []
    assert "[object" not in browser.find_element("tag name", "body").text


def test_arrow_keys_and_the_mouse_show_the_numbers_of_a_step_in_full(show: Show) -> None:
    from selenium.webdriver import ActionChains, Keys

    data = page(run(steps=30))
    browser = show(data)
    reward = data.runs[0].metrics["reward"]
    area = browser.find_element("css selector", "#chart-reward .plot")
    area.send_keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    for chart, metric in (("reward", "reward"), ("entropy", "entropy")):
        value = browser.find_element("css selector", f'#chart-{chart} [data-metric="{metric}"]')
        assert float(value.get_attribute("title")) == data.runs[0].metrics[metric][2]
        assert value.text == (value.get_attribute("title") if chart == "reward" else f"{float(value.text):.5g}")
    ActionChains(browser).move_to_element_with_offset(area, 30, 0).perform()
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    step = int(area.get_attribute("aria-valuenow"))
    assert step > 3
    assert float(browser.find_element("css selector", '[data-metric="reward"]').text) == reward[step - 1]


@pytest.mark.parametrize(
    ("address", "holds"),
    [
        ("from=11&to=31", lambda group, one: 11 <= group.step <= 31),
        ("adv=negative", lambda group, one: one.advantage < 0),
        ("min.math=0.5&from=20", lambda group, one: one.rewards["math"] >= 0.5 and group.step >= 20),
        ("q=3+%2B+4", lambda group, one: group.prompt == 1),
        ("finish=length", lambda group, one: one.finish == "length"),
    ],
)
def test_filters_filter(show: Show, address: str, holds: Callable[..., bool]) -> None:
    data = page()
    data.runs[0].rollouts.groups[2].completions[1] = completion(finish="length")
    expected = sum(holds(group, one) for group in data.runs[0].rollouts.groups for one in group.completions)
    found = show(data, f"#tab=rollouts&{address}").find_element("id", "found")
    assert int(found.get_attribute("data-count")) == expected > 0


def hostile_page() -> Any:
    turns = [{"role": text, "content": text} for text in HOSTILE]
    prompts = [PromptText(text, text, turns, text) for text in HOSTILE]
    groups = [
        GroupView(1, at, "0", at, [completion(text, 1.0, finish=text), completion(text, 0.0, tokens=[text] * 3)])
        for at, text in enumerate(HOSTILE)
    ]
    texts = "\n".join(HOSTILE)
    view = run(steps=2, facts=[(text, text) for text in HOSTILE], overrides=HOSTILE, formula=HOSTILE, label=texts)
    return page(
        replace(view, rollouts=RolloutSelection(texts, 12, [1], groups)), title=texts, prompts=prompts, notes=HOSTILE
    )


@pytest.mark.parametrize("at", range(len(HOSTILE)))
def test_hostile_text_stays_text(show: Show, at: int) -> None:
    browser = show(hostile_page(), f"#tab=rollouts&group=default~1~{at}")
    assert browser.execute_script("return window.hacked") is None
    assert browser.execute_script("return document.images.length + document.querySelectorAll('script').length") == 3
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert errors(browser) == []
    assert not set(browser.find_element("tag name", "body").text) & set("\x00\x07\x1b\u202e\u2066\u200f\u2028")


@pytest.mark.parametrize("tab", ["curves", "rollouts"])
def test_the_tab_key_reaches_every_control_and_leaves_the_page(show: Show, tab: str) -> None:
    from selenium.webdriver import ActionChains, Keys

    view = run(steps=4)
    browser = show(page(view), f"#tab={tab}")
    wanted = browser.execute_script(
        "return [...document.querySelectorAll('button, input, select, summary, [tabindex=\"0\"]')]"
        ".filter((one) => one.checkVisibility() && !one.disabled && one.tabIndex >= 0)"
        ".map((one, at) => (one.dataset.walk = at))"
    )
    reached = set()
    for _ in range(len(wanted) + 5):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        reached.add(browser.execute_script("return document.activeElement.dataset.walk ?? null"))
    assert {str(at) for at in wanted} <= reached


def test_a_link_opens_what_it_names_and_back_returns(show: Show) -> None:
    browser = show(page(), "#tab=rollouts&adv=negative&group=default~11~0")
    assert "Step 11" in browser.find_element("css selector", "#group h3").text
    browser.find_element("id", "tab-curves").click()
    assert browser.find_element("id", "panel-curves").is_displayed()
    browser.back()
    assert browser.find_element("id", "panel-rollouts").is_displayed()
    assert "adv=negative" in browser.current_url


def test_a_megabyte_in_one_line_and_ten_thousand_tokens_are_shown_in_parts(show: Show) -> None:
    long = completion("x" * 2**20, tokens=None, mask=None, logp=None, trainer_logp=None, entropy=None, ratio=None)
    many = completion(" ".join(["word"] * 10_000))
    browser = show(page(run(steps=2, rollouts=shown(long, many)), prompts=[prompt()]), "#tab=rollouts&color=logp")
    buttons = browser.find_elements("css selector", ".completion [data-more]")
    assert sorted(button.text for button in buttons) == [
        "Show more (1,000 of 10,000 tokens)",
        "Show more (4,000 of 1,048,576 characters)",
    ]
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    buttons[0].click()
    assert errors(browser) == []


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
def test_each_measure_colors_the_tokens_and_has_a_legend(show: Show, measure: str, ends: Any, colored: int) -> None:
    view = run(steps=2, rollouts=shown(completion("a b c d e f g h")))
    browser = show(page(view), f"#tab=rollouts&color={measure}&marks=1")
    tokens = browser.find_elements("css selector", ".token[data-token]")
    assert len(tokens) == 8
    backgrounds = [token.value_of_css_property("background-color") for token in tokens]
    assert sum(color != "rgba(0, 0, 0, 0)" for color in backgrounds) == colored
    legend = browser.find_elements("css selector", ".legend:has(.ramp)")
    assert [(one.text.splitlines()[0], one.text.splitlines()[-1]) for one in legend] == ([ends] if ends else [])


def test_an_episode_is_shown_as_turns(show: Show) -> None:
    said = [("assistant", "2+2="), ("tool", "4"), ("assistant", "It is 4.")]
    turns = [{"role": role, "content": text} for role, text in said]
    view = run(steps=2, rollouts=shown(completion("2+2= 4 It is 4.", episode=turns, mask=[1, 0, 1, 1, 1])))
    browser = show(page(view), "#tab=rollouts")
    found = browser.find_elements("css selector", ".completion .turn")
    assert [one.text.split("\n") for one in found] == [list(turn) for turn in said]
    browser.find_element("css selector", '[data-control="measure"] [value="logp"]').click()
    starts = browser.find_elements("css selector", ".token.turn")
    assert [int(one.get_attribute("data-token")) for one in starts] == [1, 2]


@pytest.mark.parametrize("tab", TABS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_a_sweep(show: Show, tab: str, scheme: str) -> None:
    from axe_core_python.selenium import Axe

    browser = show(sweep(4, 2, 10), f"#tab={tab}", scheme=scheme)
    browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
    found = [one for one in Axe().run(browser)["violations"] if one["impact"] in ("serious", "critical")]
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == []


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
    assert [len(chart.find_elements("tag name", "canvas")) for chart in charts] == [1] * 5
    assert all(chart.is_displayed() for chart in charts)
    assert sum(one.is_displayed() for one in browser.find_elements("css selector", ".completion")) == 8
    assert browser.find_element("css selector", ".printed-note").text == "Printed: 8 of 16 completions."
    assert not any(one.is_displayed() for one in browser.find_elements("css selector", "#list, button, select"))
    assert browser.execute_script("return document.documentElement.dataset.theme") == "light"
    media("screen", prefers_color_scheme="dark")
    wait_until(lambda: not browser.find_element("id", "panel-curves").is_displayed())
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
