"""docs/evidence/peers.md is up to date."""

from __future__ import annotations

from pathlib import Path

from parity.peer_page import document

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "peers.md"


def test_the_page_is_current() -> None:
    assert document() == PAGE.read_text(), "docs/evidence/peers.md differs from the compared definitions: run make docs"
