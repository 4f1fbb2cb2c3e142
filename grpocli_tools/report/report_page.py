"""The report's page of runs, with the formulas of their objectives: what the trainer's hook and the commands call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpocli.config.parts import CLASSES
from grpocli.config.yaml_text import leaves
from grpocli.errors import ConfigError, GrpoError
from grpocli.progress import Progress, unreported
from grpocli.runs.saved_run import SavedRun

PLAIN_REWARD = "grpocli.rewards.reward.BaseReward"


def report_page(
    folders: Sequence[Path], completions: int | None = None, progress: Progress = unreported, made: str = ""
) -> str:
    """The page as HTML. completions: about how many; None for as many as fit. made: its date; "" for now.

    Raises ConfigError without runs.
    """
    from grpocli_tools.report.build_page import Builder
    from grpocli_tools.report.html import page_html

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
