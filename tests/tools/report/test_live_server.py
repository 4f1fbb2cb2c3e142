"""The real server of the live page: the command from start to Ctrl-C, and the browser."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from cli.running import finish, start
from report.conftest import wait_until
from report.large_run import write_large_run
from report.test_live_data import add, make_run, row

from grpocli.errors import ConfigError
from grpocli_tools.report.watch_command import main

ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)")


class Watch:
    """`grpocli watch` in another process."""

    def __init__(self, *words: str) -> None:
        self.process = start("watch", *words)
        self.lines: list[str] = []
        self.address = self.next_address()
        self.port = int(ADDRESS.search(self.address)[1])  # type: ignore[index]

    def next_address(self) -> str:
        assert self.process.stdout
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
def test_a_range_loads_the_completions_of_its_steps_and_says_which(
    opened: Callable[[Path], Any], tmp_path: Path
) -> None:
    browser = opened(write_large_run(tmp_path / "a", steps=40, groups=1, size=1))

    def loaded(address: str, count: int, said: str) -> None:
        browser.execute_script(f"location.hash = 'tab=rollouts&{address}'")
        browser.refresh()
        wait_until(lambda: browser.find_element("id", "found").get_attribute("data-count") == str(count))
        wait_until(lambda: said in browser.find_element("id", "loaded").text)

    loaded("from=3&to=6", 4, "")
    loaded("from=5", 20, "Loaded: steps 5 to 24, of 36 steps")
    loaded("to=30", 20, "Loaded: steps 11 to 30, of 30 steps")
