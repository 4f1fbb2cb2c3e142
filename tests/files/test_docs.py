"""The pages name files and links that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOUSES = [ROOT / "grpocli", ROOT / "grpocli_tools"]
DOCS = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/evidence/*.md")]
ROOMS = [page for house in [*HOUSES, ROOT / "hydra_plugins"] for page in house.glob("**/README.md")]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.md"), *ROOMS]
FOLDERS = {path.name for house in HOUSES for path in house.iterdir() if path.is_dir()} | {"tests", "bench", "scripts"}
MODULE = re.compile(rf"`(?:grpocli/)?((?:{'|'.join(sorted(FOLDERS))})/[\w/]+\.(?:py|sh|jsonl?))")
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)")
CLASS = re.compile(r"`([A-Z]\w+)[`.(]")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
SECTION = re.compile(r"^## (.*)$", re.MULTILINE)
PROGRAM = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CONTENTS = re.compile(r"(?:^- \[.+\]\(#.+\)\n)+", re.MULTILINE)
CODE = [file for house in [*HOUSES, ROOT / "hydra_plugins"] for file in house.glob("**/*.py")]
WORDS = {word for file in CODE for word in re.findall(r"\w+", file.read_text())}
LONG = 100
"""Lines from which a page of docs/ has a table of contents."""


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_modules_named_on_a_page_exist(page: Path) -> None:
    names = MODULE.findall(page.read_text())
    assert [name for name in names if not any((base / name).is_file() for base in (*HOUSES, ROOT))] == []


@pytest.mark.parametrize("page", [*ROOMS, ROOT / "docs" / "architecture.md"], ids=name)
def test_classes_that_a_page_points_at_exist(page: Path) -> None:
    """In a room's README those before its decisions, which also name classes of libraries."""
    text = page.read_text()
    named = CLASS.findall(text.partition("\n**")[0] if page in ROOMS else text)
    assert [one for one in named if one not in WORDS] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_of_a_page_exist(page: Path) -> None:
    broken = []
    for target, heading in LINK.findall(page.read_text()):
        path = (page.parent / target) if target else page
        headings = HEADING.findall(path.read_text()) if heading and path.is_file() else []
        if not path.exists() or (heading and heading not in map(anchor, headings)):
            broken.append(target + heading)
    assert broken == []


@pytest.mark.parametrize("page", sorted(DOCS), ids=name)
def test_a_long_page_begins_with_its_sections(page: Path) -> None:
    text = PROGRAM.sub("", page.read_text())
    titles = SECTION.findall(text)
    contents = CONTENTS.search(text.partition("\n## ")[0] + "\n")
    assert contents or text.count("\n") < LONG
    if contents:
        assert contents[0].splitlines() == [f"- [{title}]({anchor(title)})" for title in titles]


def test_every_page_is_listed() -> None:
    listed = (ROOT / "docs" / "README.md").read_text()
    assert [name(page) for page in DOCS if f"({page.relative_to(ROOT / 'docs')})" not in listed] == ["docs/README.md"]
