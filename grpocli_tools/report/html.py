"""A page as one HTML file: the data of `page_data.py` inside the template, style and script of `page/`."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from grpocli.text import one_line
from grpocli_tools.report.page_data import PageData

SCRIPTS = (
    "dom.js",
    "state.js",
    "series.js",
    "charts.js",
    "curves.js",
    "runs.js",
    "overview.js",
    "tokens.js",
    "prompts.js",
    "rollouts.js",
    "live.js",
    "main.js",
)
"""The page's own scripts, in the order in which they are joined."""

_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def page_html(data: PageData) -> str:
    """The page as HTML that loads nothing else. With `data.live` its script asks that address for newer data."""
    style, script = _style(), _script()
    head = replace(
        data, prompts=[], runs=[replace(run, rollouts=replace(run.rollouts, groups=[])) for run in data.runs]
    )
    rollouts = {"prompts": data.prompts, "groups": {run.id: run.rollouts.groups for run in data.runs}}
    template = Environment(autoescape=True, undefined=StrictUndefined, loader=FunctionLoader(_page_file)).get_template(
        "page.html"
    )
    # Markup: our own files, and JSON without a character of markup
    return template.render(
        title=one_line(data.title),
        policy=_policy(style, script, live=data.live is not None),
        style=Markup(style),
        script=Markup(script),
        data=Markup(embedded_json(head)),
        rollouts=Markup(embedded_json(rollouts)),
    )


def live_html(title: str, version: str, live: str = "") -> str:
    """The page of `grpocli watch`, without data: its script loads them from `live`, relative to the page."""
    return page_html(PageData(title=title, made="", version=version, charts=[], runs=[], live=live))


def live_policy() -> str:
    """The Content-Security-Policy of the page of `live_html`."""
    return _policy(_style(), _script(), live=True)


def page_json(value: Any) -> str:
    """`value` (dataclasses, dicts, lists, texts, numbers) as ASCII JSON. Half a surrogate pair stays an escape."""
    return json.dumps(value, default=_fields_of, allow_nan=False, separators=(",", ":"))


def embedded_json(value: Any) -> str:
    """JSON that can stand inside `<script>`: it has no `<`, `>` or `&`, and ASCII has no U+2028 or U+2029."""
    text = page_json(value)
    for character, escape in _ESCAPES.items():  # faster than `translate`, which looks up each of six million
        text = text.replace(character, escape)
    return text


def _fields_of(value: Any) -> dict[str, Any]:
    """`dataclasses.asdict` copies each number of each token; this copies nothing."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _policy(style: str, script: str, live: bool) -> str:
    """A Content-Security-Policy that allows this style and script, and with `live` requests to the page's server."""
    rules = [
        "default-src 'none'",
        f"script-src '{_hash(script)}'",
        f"style-src '{_hash(style)}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join([*rules, "connect-src 'self'"] if live else rules)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _page_file(name: str) -> str:
    return files("grpocli_tools.report").joinpath("page", *name.split("/")).read_text(encoding="utf-8")


@cache
def _style() -> str:
    return "\n" + _page_file("vendor/uPlot.min.css") + "\n" + _page_file("page.css")


@cache
def _script() -> str:
    """uPlot with its license, then our scripts in one function, so that they share names and leave none behind."""
    uplot = _page_file("vendor/uPlot.iife.min.js")
    license_text = _page_file("vendor/uPlot-LICENSE.txt")
    ours = "\n".join(_page_file(name) for name in SCRIPTS)
    return f'\n/*\n{license_text}\n*/\n{uplot}\n(() => {{\n"use strict";\n{ours}\n}})();\n'
