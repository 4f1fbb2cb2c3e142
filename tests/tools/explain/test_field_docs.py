"""Field docs are the docstrings below fields, and every key has one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from grpocli.composition.compose import register_parts
from grpocli.config.parts import CLASSES
from grpocli_tools.explain.documentation import class_doc, field_docs, summary

register_parts()
OWN = {name: cls for name, cls in CLASSES.items() if cls.__module__.startswith("grpocli.")}
SECTIONS = ("train", "rollout", "checkpoint", "eval", "hub")


@dataclass
class Base:
    """The base.

    More about it.
    """

    scale: float = 1.0
    """Factor of the score,
    in any unit."""
    kept: int = 2
    """From the base."""


@dataclass
class Derived(Base):
    scale: float = 2.0
    """Factor of the derived score."""
    silent: int = 3
    constant = 4
    """Not a field."""


def test_a_docstring_belongs_to_the_field_above_it() -> None:
    assert field_docs(Base) == {"scale": "Factor of the score, in any unit.", "kept": "From the base."}


def test_fields_inherit_and_replace_docs() -> None:
    assert field_docs(Derived) == {"scale": "Factor of the derived score.", "kept": "From the base."}


def test_a_class_without_source_has_no_docs() -> None:
    made = dataclasses.make_dataclass("Made", [("scale", float, 1.0)])
    assert field_docs(made) == {}


def test_the_summary_is_the_first_line_or_the_name() -> None:
    assert summary(Base) == "The base."
    assert class_doc(Base) == "The base.\n\nMore about it."
    assert class_doc(Derived) == "Derived"


@pytest.mark.parametrize("name", OWN)
def test_every_key_of_the_config_has_a_docstring(name: str) -> None:
    made: type[Any] = OWN[name]
    names = {f.name for f in dataclasses.fields(made)} if dataclasses.is_dataclass(made) else set()
    if name == "run":
        names -= set(SECTIONS)  # documented by their classes
    assert names - set(field_docs(made)) == set()
