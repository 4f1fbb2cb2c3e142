"""Files of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write a .jsonl file. Returns its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
