"""The first thing that a sandboxed process does: read its order, shut itself in, and take up its part."""

from __future__ import annotations

import os
import sys

from . import namespaces, program, restrict, tests
from .protocol import Wire, decode, nothing


def main() -> None:
    """The order is on the standard input; how far it got goes to the file `status`."""
    order = decode(sys.stdin.buffer.read(), nothing)
    restrict.die_with_parent()
    status = order["status"]
    try:
        # those that wait for this one count too, where they are the same user's
        outside = 0 if os.getuid() == 0 else 2 if order["namespaces"] else 1
        if order["namespaces"]:
            namespaces.enter(order["readable"], order["disk_mb"])
        restrict.limit(order["timeout"], order["memory_mb"], order["disk_mb"])
        if order["shut_in"]:
            restrict.limit_processes(order["processes"] + 1 + outside)
            restrict.give_up_privileges()
    except (restrict.Unavailable, OSError, ValueError) as error:
        os.write(status, f"{error}".encode())
        os._exit(1)
    os.write(status, b"shut in")
    os.close(status)
    wire = Wire(order["wire"])
    if "tests" in order:
        tests.run(wire, order["reference"], order["entry"], order["setup"], order["tests"], order["verdict"])
    else:
        program.serve(wire, order["text"], order["before"])
    os._exit(0)  # threads and handlers of the code's have no say in it
