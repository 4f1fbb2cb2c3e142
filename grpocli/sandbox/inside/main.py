"""The entry point of a sandboxed process: read the order, isolate this process, run the program or the tests."""

from __future__ import annotations

import os
import sys

from . import isolation, program, tests
from .protocol import Connection, decode, nothing


def main() -> None:
    """Read the order from standard input; report "isolated", or an error, to the file descriptor `status`."""
    order = decode(sys.stdin.buffer.read(), nothing)
    isolation.die_with_parent()
    status = order["status"]
    try:
        # processes of the same user that wait for this one count toward the limit, too
        outside = 0 if os.getuid() == 0 else 2 if order["namespaces"] else 1
        if order["namespaces"]:
            isolation.enter(order["readable"], order["disk_mb"])
        most = order["processes"] + 1 + outside if order["isolated"] else None
        isolation.limit(order["timeout"], order["memory_mb"], order["disk_mb"], most)
        if order["isolated"]:
            isolation.give_up_privileges()
    except (isolation.Unavailable, OSError, ValueError) as error:
        os.write(status, f"{error}".encode())
        os._exit(1)
    os.write(status, b"isolated")
    os.close(status)
    connection = Connection(order["connection"])
    if "tests" in order:
        reference, entry_point = order["reference"], order["entry_point"]
        tests.run(connection, reference, entry_point, order["setup"], order["tests"], order["results"])
    else:
        program.serve(connection, order["program"])
    os._exit(0)  # without waiting for threads and exit handlers of the program
