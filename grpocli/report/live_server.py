"""The server of `grpocli watch`: uvicorn on 127.0.0.1, with limits on connections and slow clients."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from starlette.types import ASGIApp
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from grpocli.errors import ConfigError
from grpocli.processes.signals import handle_stops, restore

ADDRESS = "127.0.0.1"
MOST_CONNECTIONS = 64
LONGEST_HEADER = 1 << 14
SLOW = 10.0
"""Seconds in which a client must send a request, and take some of the answer."""
NICE = 10
"""The run's processes come first on a busy machine."""


class BoundedProtocol(H11Protocol):
    """HTTP that closes connections whose client sends nothing, or does not read the answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.checked: Any = None
        self.unread = 0
        self.timer = self.loop.call_later(SLOW, self.close_if_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self.timer.cancel()
        super().connection_lost(exc)

    def close_if_slow(self) -> None:
        """Close the connection if nothing happened since the last check, unless the application is still working."""
        unread = self.transport.get_write_buffer_size()
        working = self.cycle is not None and not self.cycle.response_started
        idle = self.cycle is self.checked and unread >= self.unread and not working
        if idle and (self.cycle is None or self.cycle.response_complete or unread):
            self.transport.abort()
            return
        self.checked, self.unread = self.cycle, unread
        self.timer = self.loop.call_later(SLOW, self.close_if_slow)


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
        """End now; an answer under way is not waited for."""
        self.should_exit = self.force_exit = True


def listen(port: int) -> socket.socket:
    """A socket on the loopback address. port: 0 for a free one. Raises ConfigError if it cannot be opened."""
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((ADDRESS, port))
        server.listen(MOST_CONNECTIONS)
    except OSError as error:
        server.close()
        used = error.errno == errno.EADDRINUSE
        problem = "is used by another program" if used else str(error.strerror or error).lower()
        raise ConfigError(problem, key="--port", value=port, hint="choose another one, or leave it out") from error
    return server


def serve(app: ASGIApp, server: socket.socket) -> None:
    """Answer requests until Ctrl-C."""
    with suppress(OSError):
        os.nice(NICE)
    config = Config(
        app,
        http=BoundedProtocol,
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
        h11_max_incomplete_event_size=LONGEST_HEADER,
    )
    asyncio.run(QuietServer(config).serve(sockets=[server]))
