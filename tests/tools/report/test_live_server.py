"""The real server of the live page: raw requests over a socket, the command from start to Ctrl-C, and the browser."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from cli.running import finish, start
from report.conftest import wait_until
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

    def raw(self, request: bytes) -> bytes:
        """The answer to these bytes, until the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(request)
            parts = []
            while part := connection.recv(1 << 16):
                parts.append(part)
        return b"".join(parts)

    def cookie(self) -> str:
        answer = self.get(self.address.partition(str(self.port))[2])
        assert answer.status == 303
        return str(answer.headers["set-cookie"]).partition(";")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("watched")
    make_run(path / "a")
    return path


@pytest.fixture(scope="module")
def watch(folder: Path) -> Iterator[Watch]:
    started = Watch(str(folder))
    yield started
    started.process.kill()
    started.process.communicate()


@pytest.mark.processes
def test_the_server_listens_on_the_loopback_address_only(watch: Watch) -> None:
    listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    locals_ = [line.split()[1] for line in listening.splitlines() if f":{watch.port:04X} " in line and " 0A " in line]
    assert locals_ == [f"0100007F:{watch.port:04X}"]


@pytest.mark.processes
def test_watch_shows_new_steps_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    watch = Watch(str(tmp_path))
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


@pytest.mark.browser
@pytest.mark.processes
def test_a_new_step_appears_on_the_open_page(chromium: Any, tmp_path: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    run = make_run(tmp_path / "a")
    watch = Watch(str(run))
    try:
        chromium.get_log("browser")
        chromium.get(watch.address)
        steps = (
            "return [...document.querySelectorAll('#chart-reward .plot')].map((p) => p.getAttribute('aria-valuemax'))"
        )
        wait = WebDriverWait(chromium, 120)
        wait.until(lambda browser: browser.execute_script(steps) == ["3"])
        chromium.execute_script("window.unchanged = true")
        add(run, row(4), row(5))
        wait.until(lambda browser: browser.execute_script(steps) == ["5"])
        assert chromium.execute_script("return window.unchanged") is True
        assert "token" not in chromium.current_url
        assert [line for line in chromium.get_log("browser") if line["level"] in ("SEVERE", "WARNING")] == []
    finally:
        watch.process.kill()
        watch.process.communicate()
        chromium.get("about:blank")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n", 403),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n", 403),
    ],
)
def test_raw_requests_are_refused(watch: Watch, request_: bytes, status: int) -> None:
    answer = watch.raw(request_ + b"Connection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"uvicorn" not in answer
