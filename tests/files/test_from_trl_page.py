"""docs/from-trl.md is up to date, and names everything."""

from __future__ import annotations

from pathlib import Path

import pytest
from from_trl_page import from_trl_page

from grpocli.composition.compose import register_parts
from grpocli.composition.hydra_sources import conf_dir
from grpocli_tools.explain.keys import ReferenceIndex
from grpocli_tools.porting.foreign_names import GRPO_CONFIG, NEMO_RL

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def reference() -> ReferenceIndex:
    register_parts()
    return ReferenceIndex(Path(conf_dir()))


def test_the_page_of_foreign_names_is_current(reference: ReferenceIndex) -> None:
    page = from_trl_page(reference)
    assert page == (DOCS / "from-trl.md").read_text(), "run make docs"
    assert all(f"| `{name}` |" in page for name in [*GRPO_CONFIG, *NEMO_RL])
