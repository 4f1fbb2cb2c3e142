"""The live page: when its data is sent again, whom it lets in with a token once, and its server until Ctrl-C."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from cli.running import finish, start
from report.conftest import wait_until
from report.test_report_data import run_folder, write_large_run
from starlette.testclient import TestClient

from grpocli.errors import ConfigError
from grpocli.runs.run_dir import RunDir
from grpocli_tools.report.build_page import Builder
from grpocli_tools.report.live_server import BrowserSessions, LiveData, live_app
from grpocli_tools.report.report_page import page_json
from grpocli_tools.report.watch_command import main


def row(step: int, **more: Any) -> str:
    return json.dumps({"step": step, "reward": step / 10, "time/step": 1.0, **more}) + "\n"


def add(run: Path, *lines: str) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(lines)


def make_run(path: Path, steps: int = 3) -> Path:
    config = "train: {steps: 10}\neval: {problems: 100, samples: 4}\n"
    return run_folder(path, [row(step) for step in range(1, steps + 1)], config)


def build(folders: Any) -> Any:
    return Builder(lambda run: ["J = 1"], live=True).page(folders)


@pytest.fixture
def live(tmp_path: Path) -> Callable[..., LiveData]:
    def made(*folders: Path) -> LiveData:
        return LiveData(folders or (tmp_path,), build, clock=itertools.count(0, 100).__next__)

    return made


def answer(value: Any) -> Any:
    return None if value is None else json.loads(page_json(value))


def test_a_page_is_sent_once_and_again_when_it_changes(live: Callable[..., LiveData], tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    data = live()
    whole = answer(data.newer())
    assert whole["runs"][0]["steps"] == [1, 2, 3]
    assert data.newer(whole["tag"]) is None
    add(run, row(4), row(5))
    news = answer(data.newer(whole["tag"]))
    assert news["runs"][0]["steps"] == [1, 2, 3, 4, 5]
    assert ["steps", "5 of 10"] in news["runs"][0]["facts"]
    (run / "new").write_text(row(1) + row(2, reward=7))  # a resume that cuts the run back
    (run / "new").rename(run / "metrics.jsonl")
    assert answer(data.newer(news["tag"]))["runs"][0]["metrics"]["reward"] == [0.1, 7]


def test_steps_logged_while_the_page_is_built_again_are_not_lost(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    meanwhile: list[str] = []

    def load(folders: Any) -> Any:
        page = build(folders)
        add(run, *meanwhile)
        return page

    data = LiveData([tmp_path], load, clock=itertools.count(0, 100).__next__)
    data.newer()
    add(run, row(4))
    meanwhile.append(row(5))
    data.newer()
    meanwhile.clear()
    assert answer(data.newer())["runs"][0]["steps"] == [1, 2, 3, 4, 5]


def test_a_torn_line_of_a_running_run_waits_for_its_end(live: Callable[..., LiveData], tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    with RunDir(run).locked():
        data = live()
        tag = answer(data.newer())["tag"]
        line = row(4)
        add(run, line[:20])
        assert data.newer(tag) is None
        add(run, line[20:])
        assert answer(data.newer(tag))["runs"][0]["steps"] == [1, 2, 3, 4]


def test_a_folder_is_waited_for_and_a_deleted_run_is_a_note(live: Callable[..., LiveData], tmp_path: Path) -> None:
    data = live(tmp_path / "later")
    first = answer(data.newer())
    assert first["runs"] == []
    assert "waiting for a run" in first["notes"][0]
    make_run(tmp_path / "later" / "a"), make_run(tmp_path / "later" / "b")
    assert [run["name"] for run in answer(data.newer(first["tag"]))["runs"]] == ["a", "b"]
    shutil.rmtree(tmp_path / "later" / "a")
    whole = answer(data.newer())
    assert [run["name"] for run in whole["runs"]] == ["b"]
    assert whole["notes"][0] == "a: its folder is not there any more"


PATHS = ("/", "/data", "/data?known=x", "/rollouts?run=r0&step=1", "/nothing", "/?token=wrong", "/?token=")


class Page:
    """A served page: its sessions, the tokens that were announced, and clients."""

    def __init__(self, folder: Path) -> None:
        make_run(folder / "a")
        self.announced: list[str] = []
        self.sessions = BrowserSessions("grpocli_watch_1", self.announced.append)
        self.app = live_app(LiveData((folder,), build), self.sessions, "watch")

    def client(self, host: str = "http://127.0.0.1:8080") -> Any:
        return TestClient(self.app, base_url=host, follow_redirects=False)

    def admitted(self) -> Any:
        client = self.client()
        assert client.get(f"/?token={self.sessions.token}").status_code == 303
        return client


@pytest.fixture
def served(tmp_path: Path) -> Page:
    return Page(tmp_path)


@pytest.mark.parametrize("path", PATHS)
def test_without_a_session_everything_is_refused_with_a_sentence(served: Page, path: str) -> None:
    answer = served.client().get(path)
    assert (answer.status_code, answer.text.count("\n"), "grpocli watch" in answer.text) == (403, 1, True)
    assert answer.headers["content-type"].startswith("text/plain")


def test_a_token_lets_one_browser_in(served: Page) -> None:
    first, second = served.client(), served.client()
    token = served.sessions.token
    answer = first.get(f"/?token={token}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "Path=/", "SameSite=strict"} <= set(cookie.split("; "))
    assert token not in cookie
    assert first.get("/").status_code == first.get("/data").status_code == 200
    assert second.get(f"/?token={token}").status_code == 403
    assert second.get("/").status_code == 403
    assert served.announced == [served.sessions.token] != [token]
    assert second.get(f"/?token={served.announced[0]}").status_code == 303


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1"}, 200),
        ({"host": "LOCALHOST:65535"}, 200),  # a tunnel may change the port
        ({"host": "[::1]:8080"}, 200),
        ({"host": ""}, 403),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
    ],
)
def test_requests_of_another_host_or_site_are_refused_even_with_a_session(served: Page, headers, status: int) -> None:
    assert served.admitted().get("/data", headers=headers).status_code == status


@pytest.mark.parametrize("path", [*PATHS, "/rollouts?run=../..&step=1"])
def test_every_answer_has_the_headers(served: Page, path: str) -> None:
    for client in (served.client(), served.admitted()):
        headers = client.get(path).headers
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


def test_the_page_has_the_policy_of_its_script(served: Page) -> None:
    answer = served.admitted().get("/")
    policy = answer.headers["content-security-policy"].removesuffix("; frame-ancestors 'none'")
    assert f'content="{policy.replace(chr(39), "&#39;")}"' in answer.text


@pytest.mark.parametrize(
    ("query", "status"), [("run=r0&step=1", 404), ("run=../../etc&step=1", 404), ("run=r0&step=-1", 400), ("", 400)]
)
def test_a_wrong_question_about_rollouts_is_one_sentence(served: Page, query: str, status: int) -> None:
    answer = served.admitted().get(f"/rollouts?{query}")
    assert (answer.status_code, answer.text.count("\n")) == (status, 1)


ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)")


class Watch:
    """`grpocli watch` in another process."""

    def __init__(self, *words: str) -> None:
        self.process = start("watch", *words)
        self.lines: list[str] = []
        self.address = self.next_address()
        self.port = int(ADDRESS.search(self.address)[1])  # type: ignore[index]

    def next_address(self) -> str:
        for line in self.process.stdout:
            self.lines.append(line)
            if found := ADDRESS.search(line):
                return found[0]
        raise AssertionError("".join(self.lines))

    def get(self, path: str, **headers: str) -> HTTPResponse:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        answer.body = answer.read()  # type: ignore[attr-defined]
        connection.close()
        return answer

    def cookie(self) -> str:
        answer = self.get(self.address.partition(str(self.port))[2])
        assert answer.status == 303
        return str(answer.headers["set-cookie"]).partition(";")[0]


@pytest.mark.processes
def test_watch_shows_new_steps_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    watch = Watch(str(tmp_path))
    listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    locals_ = [line.split()[1] for line in listening.splitlines() if f":{watch.port:04X} " in line and " 0A " in line]
    assert locals_ == [f"0100007F:{watch.port:04X}"], "the loopback address alone"
    cookie = watch.cookie()
    token = ADDRESS.search(watch.address)[2]  # type: ignore[index]
    assert watch.next_address() != watch.address
    page = watch.get("/data", Cookie=cookie)
    assert page.status == 200
    tag = re.search(rb'"tag":"([^"]+)"', page.body)[1].decode()  # type: ignore[attr-defined,index]
    add(run, row(4))
    wait_until(lambda: b'"steps":[1,2,3,4]' in watch.get(f"/data?known={tag}", Cookie=cookie).body)  # type: ignore[attr-defined]
    idle = socket.create_connection(("127.0.0.1", watch.port))
    watch.process.send_signal(signal.SIGINT)
    code, rest = finish(watch.process)
    idle.close()
    assert (code, rest) == (0, "the server has stopped; the runs continue\n")
    assert sum(token in line for line in watch.lines) == 1


def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port={port}: .*ddress already in use.*; choose another one"):
            main([str(tmp_path), "--port", str(port)])


@pytest.fixture
def opened(chromium: Any) -> Iterator[Callable[[Path], Any]]:
    """Opens the live page of a run in the browser."""
    watches = []

    def open_(run: Path) -> Any:
        watches.append(Watch(str(run)))
        chromium.get_log("browser")
        chromium.get(watches[-1].address)
        wait_until(lambda: chromium.find_elements("css selector", "#tabs [role=tab]"))
        return chromium

    yield open_
    for watch in watches:
        watch.process.kill()
        watch.process.communicate()
    chromium.get("about:blank")


@pytest.mark.browser
@pytest.mark.processes
def test_a_new_step_appears_on_the_open_page(opened: Callable[[Path], Any], tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    browser = opened(run)
    steps = "return [...document.querySelectorAll('#chart-reward .plot')].map((p) => p.getAttribute('aria-valuemax'))"
    wait_until(lambda: browser.execute_script(steps) == ["3"])
    browser.execute_script("window.unchanged = true")
    add(run, row(4), row(5))
    wait_until(lambda: browser.execute_script(steps) == ["5"])
    assert browser.execute_script("return window.unchanged") is True
    assert "token" not in browser.current_url
    assert [line for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")] == []


@pytest.mark.browser
@pytest.mark.processes
def test_a_range_loads_the_completions_of_its_steps_and_says_which(opened: Any, tmp_path: Path) -> None:
    browser = opened(write_large_run(tmp_path / "a", steps=40, groups=1, size=1))

    def loaded(address: str, count: int, said: str) -> None:
        browser.execute_script(f"location.hash = 'tab=rollouts&{address}'")
        browser.refresh()
        wait_until(lambda: browser.find_element("id", "found").get_attribute("data-count") == str(count))
        wait_until(lambda: said in browser.find_element("id", "loaded").text)

    loaded("from=3&to=6", 4, "")
    loaded("from=5", 20, "Loaded: steps 5 to 24, of 36 steps")
    loaded("to=30", 20, "Loaded: steps 11 to 30, of 30 steps")
