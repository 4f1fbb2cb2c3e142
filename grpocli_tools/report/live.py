"""The web application of `grpocli watch`: the page, its data, and who may see them."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request, cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpocli.errors import GrpoError
from grpocli.processes.threads import run_in_thread
from grpocli.version import __version__
from grpocli_tools.report.html import live_html, live_policy, page_json
from grpocli_tools.report.live_data import LiveData

HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
MOST_SESSIONS = 64
"""Browsers with a session at the same time; one more ends the oldest session."""
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
        self.known = [*self.known, session][-MOST_SESSIONS:]
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

    async def run(work: Callable[[], str | None]) -> Response:
        async with one_at_a_time:
            text = await asyncio.wrap_future(run_in_thread(work, "live data"))  # Ctrl-C need not wait for it
        return Response(status_code=204) if text is None else Response(text, media_type="application/json")

    async def show_page(request: Request) -> Response:
        return Response(page, media_type="text/html", headers=policy)

    async def show_data(request: Request) -> Response:
        cursor = request.query_params.get("since")
        try:
            return await run(lambda: _json(data.whole() if cursor is None else data.since(cursor)))
        except (GrpoError, OSError) as error:
            return _text(f"{error}.", 500)

    async def show_rollouts(request: Request) -> Response:
        run_id, step = request.query_params.get("run", ""), request.query_params.get("step", "")
        if not step.isdecimal():
            return _text("The step must be a number.", 400)
        try:
            answer = await run(lambda: _json(data.rollouts(run_id, int(step))))
        except (GrpoError, OSError) as error:
            return _text(f"{error}.", 422)
        return answer if answer.status_code == 200 else _text("This run has no rollouts of this step.", 404)

    routes = [Route("/", show_page), Route("/data", show_data), Route("/rollouts", show_rollouts)]
    return AccessGuard(Starlette(routes=routes), sessions)


def _json(answer: object) -> str | None:
    return None if answer is None else page_json(answer)
