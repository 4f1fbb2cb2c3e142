"""Pages of docs/ that are made from the code are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest
from algorithms_page import main
from from_trl_page import from_trl_page
from parity.peer_page import document

from grpocli.composition.compose import register_parts
from grpocli.composition.hydra_sources import conf_dir
from grpocli_tools.explain.keys import ReferenceIndex
from grpocli_tools.porting.foreign_names import GRPO_CONFIG, NEMO_RL

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow
def test_the_page_of_algorithms_is_current(tmp_path: Path) -> None:
    assert main([str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == (DOCS / "algorithms.md").read_text(), "run make docs"


def test_the_page_of_peers_is_current() -> None:
    assert document() == (DOCS / "evidence" / "peers.md").read_text(), "run make docs"


def test_the_page_of_foreign_names_is_current_and_whole() -> None:
    register_parts()
    page = from_trl_page(ReferenceIndex(Path(conf_dir())))
    assert page == (DOCS / "from-trl.md").read_text(), "run make docs"
    assert all(f"| `{name}` |" in page for name in [*GRPO_CONFIG, *NEMO_RL])
