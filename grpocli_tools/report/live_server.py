"""The server of `grpocli watch`: uvicorn on 127.0.0.1, with a limit on connections."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from starlette.types import ASGIApp
from uvicorn import Config, Server

from grpocli.errors import ConfigError
from grpocli.processes.signals import handle_stops, restore

ADDRESS = "127.0.0.1"
MOST_CONNECTIONS = 64
NICE = 10
"""The run's processes come first on a busy machine."""


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
