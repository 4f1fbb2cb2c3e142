"""The report's page of runs, with the formulas of their objectives: what the trainer's hook and the commands call."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from grpocli.config.parts import CLASSES
from grpocli.config.yaml_text import leaves
from grpocli.errors import ConfigError, GrpoError
from grpocli.progress import Progress, unreported
from grpocli.runs.saved_run import SavedRun
from grpocli.text import one_line
from grpocli_tools.report.page_data import PageData

PLAIN_REWARD = "reward/exact_match"


def report_page(
    folders: Sequence[Path], completions: int | None = None, progress: Progress = unreported, made: str = ""
) -> str:
    """The page as HTML. completions: about how many; None for as many as fit. made: its date; "" for now.

    Raises ConfigError without runs.
    """
    from grpocli_tools.report.build_page import Builder
    from grpocli_tools.report.report_page import page_html

    page = Builder(formula_lines_of, completions=completions, progress=progress).page(folders)
    return page_html(replace(page, made=made or page.made))


def formula_lines_of(run: SavedRun) -> list[str]:
    """The objective of a run as `grpocli explain resume=RUN` prints it. Raises GrpoError if it is unknown."""
    from omegaconf import OmegaConf

    from grpocli.composition.compose import register_parts
    from grpocli.config.build import build
    from grpocli_tools.explain.explanation import explanation
    from grpocli_tools.explain.render import formula_lines

    register_parts()
    try:
        config = OmegaConf.create(own_parts(run.config))
        return formula_lines(explanation(build(config), config, []))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise GrpoError("config.yaml is not the config of a run") from error


def own_parts(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a run without code outside grpocli, which a report does not run.

    Rewards become a reward without a formula; parts that the formula does not show become built-in ones. Raises
    ConfigError if the algorithm or the task names such code.
    """
    config = dict(saved) | {
        "overrides": [],
        "engine": {"_target_": "engine/auto"},
        "tracker": {"_target_": "tracker/none"},
    }
    rewards = config.get("reward") or {}
    config["reward"] = {
        name: reward if not foreign_target(reward) else {"_target_": PLAIN_REWARD, "weight": reward.get("weight", 1.0)}
        for name, reward in rewards.items()
    }
    if foreign := foreign_target({**config, "reward": {}}):
        hint = "grpocli explain resume=RUN runs it"
        raise ConfigError(
            "is code outside grpocli, which a report does not run", value=foreign, key="_target_", hint=hint
        )
    return config


def foreign_target(node: Any) -> str:
    """The first `_target_` below a plain config that is not a registered part; "" if there is none."""
    targets = (str(value) for key, value in leaves(node) if key.rpartition(".")[2] == "_target_")
    return next((target for target in targets if target and target not in CLASSES), "")


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
