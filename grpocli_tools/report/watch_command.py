"""`grpocli watch`: serve a live page about runs on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from grpocli.cli import plain_parser
from grpocli.errors import ConfigError

EPILOG = """\
examples
  grpocli watch runs/DATE/TIME            one run
  grpocli watch runs                      every run in a folder, also those that begin later
  grpocli watch RUN --port 8080 --open    on a fixed port, and open the browser

The page is served on 127.0.0.1 only. From another machine, forward the port, then open the printed address there:
  ssh -N -L PORT:127.0.0.1:PORT USER@MACHINE
Each printed address lets one browser in. Ctrl-C stops the server; the run goes on.
"""


def main(argv: Sequence[str]) -> int:
    """Serve the page until Ctrl-C. Returns the exit code. Raises ConfigError for a file or a port that is taken."""
    args = _parser().parse_args(argv)
    for folder in args.folders:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file; give the folder of a run, or a folder of runs")
    if not 0 <= args.port < 1 << 16:
        raise ConfigError("must be between 1 and 65535, or 0 for a free one", key="--port", value=args.port)
    from grpocli_tools.report.build_page import Builder
    from grpocli_tools.report.live_data import LiveData
    from grpocli_tools.report.live_server import BrowserSessions, listen, live_app, serve
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


def _parser() -> argparse.ArgumentParser:
    parser = plain_parser("watch", "Serve a live page about runs, until Ctrl-C.", EPILOG)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN|FOLDER", help="a run, or a folder of runs")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="the port on 127.0.0.1 (a free one)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser of this machine")
    return parser
