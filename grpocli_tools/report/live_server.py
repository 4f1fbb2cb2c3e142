"""The server of `grpocli watch`: the page, its data, and who may see them, on 127.0.0.1."""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request, cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config, Server

from grpocli.errors import GrpoError, config_errors
from grpocli.processes.signals import handle_stops, restore
from grpocli.processes.threads import run_in_thread
from grpocli.runs.saved_run import SavedRun, run_folders
from grpocli.version import __version__
from grpocli_tools.report.page_data import PageData
from grpocli_tools.report.report_page import live_html, live_policy, page_json
from grpocli_tools.report.rollout_sample import read_step

SHARE = 50
"""Looking that took t seconds is not repeated for SHARE * t seconds: it takes at most 2 % of a core."""
LEAST_WAIT, MOST_WAIT = 0.5, 60.0
"""Seconds after which it is repeated at the earliest and at the latest."""


@dataclass
class LiveData:
    """The page of the runs below `folders`, built again when it is asked for and files have changed."""

    folders: Sequence[Path]
    load: Callable[[Sequence[Path]], PageData]
    """The page of some run folders."""
    clock: Callable[[], float] = time.monotonic
    page: PageData | None = None
    tag: str = ""
    """Changes with the page."""

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.names: dict[Path, str] = {}
        self.signature: Any = None
        self.next_look = float("-inf")

    def newer(self, known: str = "") -> dict[str, Any] | None:
        """The whole page with its tag; None if `known` is the tag."""
        page = self._current()
        if known == self.tag:
            return None
        return {name: getattr(page, name) for name in PageData.__slots__} | {"live": "", "tag": self.tag}

    def rollouts(self, run: str, step: int) -> dict[str, Any] | None:
        """The prompts and groups of a step; None if the page has no such run or step."""
        runs = {view.id: view for view in self.page.runs} if self.page else {}
        if run not in runs or step not in runs[run].rollouts.steps:
            return None
        return read_step(Path(runs[run].path), step)

    def _current(self) -> PageData:
        with self.lock:
            if self.page is None or self.clock() >= self.next_look:
                began, is_first = self.clock(), self.page is None
                self._look()
                now = self.clock()
                took = 0.0 if is_first else now - began  # the first time libraries are loaded, too
                self.next_look = now + min(max(LEAST_WAIT, SHARE * took), MOST_WAIT)
            assert self.page is not None
            return self.page

    def _look(self) -> None:
        """Build the page again if a file has changed."""
        paths = [path for folder in self.folders if folder.is_dir() for path in sorted(run_folders(folder))]
        signature = [(path, *_signature(path)) for path in paths]  # before anything is read
        if signature == self.signature or (page := self._built(paths)) is None:
            return
        self.signature = signature
        if self.page is None or replace(page, made=self.page.made) != self.page:  # half a line changes nothing
            self.page, self.tag = page, secrets.token_hex(8)

    def _built(self, paths: Sequence[Path]) -> PageData | None:
        """The page of these runs, with a note for each that was deleted; None if one disappeared meanwhile."""
        gone = [name for path, name in self.names.items() if not path.is_dir()]
        notes = [f"{name}: its folder is not there any more" for name in gone]
        if not paths:
            watched = ", ".join(map(str, self.folders))
            return PageData("No run yet", "", __version__, [], [], notes=[*notes, f"waiting for a run in {watched}"])
        try:
            page = self.load(paths)
        except (GrpoError, OSError):
            if self.page is None:
                raise
            return None
        self.names |= {Path(run.path): run.name for run in page.runs}
        names = ", ".join(folder.resolve().name for folder in self.folders)
        title = page.title if len(paths) == 1 else f"{len(paths)} runs in {names}"
        return replace(page, title=title, notes=[*notes, *page.notes])


def _signature(path: Path) -> tuple[Any, ...]:
    """Changes when a run does a step, begins, ends, or is killed."""
    run = SavedRun(path).dir
    times = []
    for file in (run.config, run.metrics, run.summary, run.sessions, run.rollouts(0).parent):
        try:
            found = file.stat()
            times.append((found.st_ino, found.st_mtime_ns, found.st_size))
        except OSError:
            times.append((0, 0, 0))
    return (*times, run.is_running())


ADDRESS = "127.0.0.1"
MOST_CONNECTIONS = 64
NICE = 10
"""The run's processes come first on a busy machine."""
HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
FRAMES = "frame-ancestors 'none'"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}

NO_SESSION = "Open the address that grpocli watch shows in its terminal; it lets one browser in."
SPENT = "This address was used already, or is incomplete; the terminal of grpocli watch shows a new one."
WRONG_HOST = "Open this page as http://127.0.0.1 or http://localhost, with the port."
WRONG_ORIGIN = "Another site may not ask for this page; type its address into the browser."


@dataclass(slots=True)
class BrowserSessions:
    """Who may see the page: a token in an address lets one browser in, which then has a cookie.

    announce: called with the token of the next browser.
    """

    cookie: str
    announce: Callable[[str], None]
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    known: list[str] = field(default_factory=list)

    def knows(self, headers: Headers) -> bool:
        """Whether a request has the cookie of a session."""
        given = cookie_parser(headers.get("cookie", "")).get(self.cookie, "")
        return any([_equal(given, known) for known in self.known])

    def admit(self, token: str) -> str | None:
        """The cookie for a new session, if the token is right; the token is then spent."""
        if not _equal(token, self.token):
            return None
        self.token = secrets.token_urlsafe(32)
        session = secrets.token_urlsafe(32)
        self.known.append(session)
        self.announce(self.token)
        return session


def _equal(given: str, known: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), known.encode())


@dataclass(frozen=True, slots=True)
class AccessGuard:
    """Refuses requests of other sites, for other names of this machine (DNS rebinding), and without a session."""

    app: ASGIApp
    sessions: BrowserSessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Content-Security-Policy", f"default-src 'none'; {FRAMES}")
            await send(message)

        answer = self._refusal(scope) or self._entrance(scope)
        await (answer or self.app)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host, origins = headers.get("host", ""), headers.getlist("origin")
        if len(headers.getlist("host")) != 1 or not HOST.fullmatch(host):
            return _text(WRONG_HOST)
        if any(origin.lower() != f"http://{host.lower()}" for origin in origins):
            return _text(WRONG_ORIGIN)
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return _text(WRONG_ORIGIN)
        return None

    def _entrance(self, scope: Scope) -> Response | None:
        """The answer to a request with a token or without a session."""
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        is_known = self.sessions.knows(Headers(scope=scope))
        if scope["path"] != "/" or not given:
            return None if is_known else _text(NO_SESSION)
        if is_known:
            return RedirectResponse("/", 303)
        session = self.sessions.admit(given[0]) if scope["method"] == "GET" else None
        if session is None:
            return _text(SPENT)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(self.sessions.cookie, session, path="/", httponly=True, samesite="strict")
        return answer


def _text(sentence: str, status: int = 403) -> Response:
    return PlainTextResponse(sentence + "\n", status)


def live_app(data: LiveData, sessions: BrowserSessions, title: str) -> ASGIApp:
    """The application: `/` is the page, `/data` and `/rollouts` are its data."""
    page = live_html(title, __version__)
    policy = {"Content-Security-Policy": f"{live_policy()}; {FRAMES}"}
    one_at_a_time = asyncio.Lock()

    async def run(work: Callable[[], object], nothing: Response) -> Response:
        async with one_at_a_time:
            try:
                found = await asyncio.wrap_future(run_in_thread(work, "live data"))  # Ctrl-C need not wait for it
            except (GrpoError, OSError) as error:
                return _text(f"{error}.", 500)
        return nothing if found is None else Response(page_json(found), media_type="application/json")

    async def show_page(request: Request) -> Response:
        return Response(page, media_type="text/html", headers=policy)

    async def show_data(request: Request) -> Response:
        known = request.query_params.get("known", "")
        return await run(lambda: data.newer(known), Response(status_code=204))

    async def show_rollouts(request: Request) -> Response:
        run_id, step = request.query_params.get("run", ""), request.query_params.get("step", "")
        if not step.isdecimal():
            return _text("The step must be a number.", 400)
        return await run(lambda: data.rollouts(run_id, int(step)), _text("This run has no rollouts of this step.", 404))

    routes = [Route("/", show_page), Route("/data", show_data), Route("/rollouts", show_rollouts)]
    return AccessGuard(Starlette(routes=routes), sessions)


class QuietServer(Server):
    """Ends at once and without an error on Ctrl-C, SIGTERM and SIGHUP."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        before = handle_stops(lambda *_: loop.call_soon_threadsafe(self.end))
        try:
            yield
        finally:
            restore(before)

    def end(self) -> None:
        self.should_exit = self.force_exit = True


def listen(port: int) -> socket.socket:
    """A socket on the loopback address. port: 0 for a free one. Raises ConfigError if it cannot be opened."""
    with config_errors(OSError, key="--port", value=port, hint="choose another one, or leave it out"):
        return socket.create_server((ADDRESS, port), backlog=MOST_CONNECTIONS)


def serve(app: ASGIApp, server: socket.socket) -> None:
    """Answer requests until Ctrl-C."""
    with suppress(OSError):
        os.nice(NICE)
    config = Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=0,
    )
    asyncio.run(QuietServer(config).serve(sockets=[server]))
