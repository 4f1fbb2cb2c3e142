"""`grpocli watch`: serve a live page about runs on this machine, until Ctrl-C."""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from grpocli.errors import ConfigError
from grpocli_tools.options import parser_of


def main(argv: Sequence[str]) -> int:
    args = parser_of("watch", __doc__).parse_args(argv)
    for folder in args.folders:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file; give the folder of a run, or a folder of runs")
    from grpocli_tools.report.build_page import Builder
    from grpocli_tools.report.live_server import BrowserSessions, LiveData, listen, live_app, serve
    from grpocli_tools.report.report_page import formula_lines_of

    server = listen(args.port)
    port = server.getsockname()[1]
    address = f"http://127.0.0.1:{port}/?token="

    def announce(token: str) -> None:
        with suppress(OSError):  # the terminal is closed
            print(f"opened; another browser: {address}{token}", flush=True)

    data = LiveData(args.folders, Builder(formula_lines_of, live=True).page)
    sessions = BrowserSessions(f"grpocli_watch_{port}", announce)
    app = live_app(data, sessions, "grpocli watch")
    _announce(args.folders, address + sessions.token, port)
    if args.open and not webbrowser.open(address + sessions.token):
        print("no browser can be opened here", file=sys.stderr)
    with suppress(KeyboardInterrupt):  # before the server handles it
        serve(app, server)
    print("the server has stopped; the runs continue", flush=True)
    if threading.active_count() > 1:
        os._exit(0)  # a thread that still builds the page only reads
    return 0


def _announce(folders: Sequence[Path], address: str, port: int) -> None:
    from grpocli.text import one_line

    say = partial(print, flush=True)
    say(f"watching {', '.join(one_line(str(folder)) for folder in folders)}")
    for folder in folders:
        if not folder.is_dir():
            say(f"there is no folder {one_line(str(folder))} yet; its runs are shown when they begin")
    say(f"open {address}")
    connection = os.environ.get("SSH_CONNECTION", "").split()  # the client's address and port, this machine's
    if len(connection) == 4:
        user = os.environ.get("USER") or "USER"
        say(f"from your machine, first: {one_line(f'ssh -N -L {port}:127.0.0.1:{port} {user}@{connection[2]}')}")
    say("Ctrl-C stops the server")
