"""The page of a live run in a browser: new steps, and rollouts that are loaded while the reader filters."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from report.conftest import wait_until
from report.pages import completion, page, prompt, run

from grpocli_tools.report.page_data import GroupView, PageData, RolloutSelection
from grpocli_tools.report.report_page import live_html, page_json

pytestmark = pytest.mark.browser

STEPS = 40


@dataclass
class Server:
    """A server of live data. asked: the steps whose rollouts were asked for. tag: of the data."""

    data: PageData
    address: str = ""
    asked: list[int] = field(default_factory=list)
    tag: str = "0"

    def answer(self, path: str) -> tuple[str, str] | None:
        url = urlsplit(path)
        query = parse_qs(url.query)
        if url.path == "/":
            return "text/html", live_html("default", "0.1.0")
        if url.path == "/rollouts":
            step = int(query["step"][0])
            self.asked.append(step)
            finish = "length" if step == 2 else "stop"
            group = GroupView(step, 0, "0", 0, [completion(f"Step {step}.", finish=finish)])
            return "application/json", page_json({"prompts": [prompt()], "groups": [group]})
        if query.get("known") == [self.tag]:
            return None
        return "application/json", json.dumps({**json.loads(page_json(self.data)), "tag": self.tag})


@pytest.fixture
def server() -> Iterator[Server]:
    view = run(steps=STEPS)
    live = Server(
        page(replace(view, state="running", rollouts=RolloutSelection("", STEPS, list(range(1, STEPS + 1)))), live="")
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = live.answer(self.path)
            body = found[1].encode() if found else b""
            self.send_response(200 if found else 204)
            if found:
                self.send_header("Content-Type", found[0])
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        live.address = f"http://127.0.0.1:{http.server_address[1]}/"
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield live
        http.shutdown()


@pytest.fixture
def opened(chromium: Any, server: Server) -> Callable[[str], Any]:
    def show(address: str) -> Any:
        chromium.get("about:blank")
        chromium.get_log("browser")
        chromium.get(server.address + address)
        wait_until(lambda: chromium.find_elements("css selector", "#tabs [role=tab]"))
        return chromium

    return show


def found(browser: Any) -> int:
    return int(browser.find_element("id", "found").get_attribute("data-count") or 0)


def test_a_range_loads_its_steps_and_says_which(opened: Callable[[str], Any], server: Server) -> None:
    browser = opened("#tab=rollouts&from=3&to=6")
    wait_until(lambda: found(browser) == 4)
    assert browser.find_element("id", "loaded").text == ""
    opened("#tab=rollouts&from=5")
    wait_until(lambda: found(browser) == 20)
    wait_until(lambda: browser.find_element("id", "loaded").text != "")
    assert "Loaded: steps 5 to 24, of 36 steps" in browser.find_element("id", "loaded").text
    opened("#tab=rollouts&to=30")
    wait_until(lambda: "Loaded: steps 11 to 30, of 30 steps" in browser.find_element("id", "loaded").text)
    assert set(server.asked) == {*range(3, 7), *range(5, 25), *range(11, 31)}


def shown_reward(browser: Any) -> tuple[str, str]:
    """The reward beside its chart, and in full."""
    value = browser.find_element("css selector", '[data-metric="reward"]')
    return value.text, value.get_attribute("title")


def test_new_steps_reach_the_curves(opened: Callable[[str], Any], server: Server) -> None:
    browser = opened("#tab=curves")
    area = browser.find_element("css selector", "#chart-reward .plot")
    assert area.get_attribute("aria-valuenow") == str(STEPS)
    (view,) = server.data.runs
    metrics = {name: [*values, 0.123456789 if name == "reward" else None] for name, values in view.metrics.items()}
    more = replace(view, steps=[*view.steps, STEPS + 1], metrics=metrics)
    server.data, server.tag = replace(server.data, runs=[more]), "1"
    wait_until(lambda: shown_reward(browser) == ("0.12346", "0.123456789"))
    assert area.get_attribute("aria-valuenow") == str(STEPS + 1)
