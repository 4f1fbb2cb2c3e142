"""The page in a real browser: no request, exact numbers, filters, hostile text, keyboard, accessibility."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from report.pages import completion, page, prompt, run, shown, sweep

from grpocli_tools.report.page_data import GroupView, PromptText, RolloutSelection

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


def requests(browser: Any) -> list[str]:
    return browser.execute_script('return performance.getEntriesByType("resource").map((entry) => entry.name)')


@pytest.mark.parametrize("tab", ["", "#tab=results", "#tab=curves", "#tab=wall", "#tab=rollouts"])
@pytest.mark.parametrize("data", [page(), sweep()], ids=["one", "sweep"])
def test_it_loads_without_an_error_or_a_request(show: Show, data: Any, tab: str) -> None:
    browser = show(data, tab)
    assert browser.find_element("css selector", "h1").text == data.title
    assert errors(browser) == []
    assert requests(browser) == []
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
