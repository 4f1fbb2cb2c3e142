"""Selects the sandbox for programs that a model writes: `sandbox_probe.py [PYTHON]`."""

from __future__ import annotations

import json
import sys


def main() -> None:
    from grpocli.sandbox.backends import select_backend
    from grpocli.sandbox.sandbox import Limits

    print(json.dumps({"backend": select_backend(sys.argv[1] if len(sys.argv) > 1 else None, Limits())}))


if __name__ == "__main__":
    main()
