"""What went wrong, from the log of a vLLM server."""

from __future__ import annotations

import re
from pathlib import Path

TAIL = 256 * 1024  # bytes at the end of a log in which the cause is looked for
ERROR = re.compile(r"(?:^|[\s\]])((?:[\w.]+\.)?\w*(?:Error|Exception): .+|[\w.]+: error: .+)$")
NOT_THE_CAUSE = re.compile(r"Engine core initialization failed|EngineDeadError|CancelledError|KeyboardInterrupt")


def failure_cause(log: Path, since: int = 0) -> str:
    """`: CAUSE (see LOG)`, the last line of the log that names an error; `: see LOG` where none does.

    since: the byte at which this server's output begins.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    found = [match[1] for line in lines if (match := ERROR.search(line)) and not NOT_THE_CAUSE.search(line)]
    return f": {found[-1][:400]} (see {log})" if found else f": see {log}"
