"""The live page lets in a browser with a token once, and refuses everybody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report.test_live_data import make_run, no_formula
from starlette.testclient import TestClient

from grpocli_tools.report.build_page import Builder
from grpocli_tools.report.live_server import BrowserSessions, LiveData, live_app

PATHS = ("/", "/data", "/data?known=x", "/rollouts?run=r0&step=1", "/nothing", "/?token=wrong", "/?token=")


class Page:
    """A served page: its sessions, the tokens that were announced, and clients."""

    def __init__(self, folder: Path) -> None:
        make_run(folder / "a")
        self.announced: list[str] = []
        self.sessions = BrowserSessions("grpocli_watch_1", self.announced.append)
        data = LiveData((folder,), Builder(no_formula, live=True).page)
        self.app = live_app(data, self.sessions, "watch")

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
    assert answer.status_code == 403
    assert answer.headers["content-type"].startswith("text/plain")
    assert "grpocli watch" in answer.text
    assert answer.text.count("\n") == 1


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
def test_requests_of_another_host_or_site_are_refused_even_with_a_session(
    served: Page, headers: dict[str, str], status: int
) -> None:
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
