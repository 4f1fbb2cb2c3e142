"""`grpocli train`."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from grpocli.commands.hydra_app import arguments, hydra_app, only_prints, options_first, search_path
from grpocli.config.resume import Resume
from grpocli.errors import ConfigError


def main(argv: list[str]) -> int:
    """Check everything that can be checked in a second, then run. Returns the exit code."""
    argv = options_first(argv)
    args = arguments(argv)
    if only_prints(args):
        if args.multirun and not args.help:
            raise ConfigError("-m: a sweep has several configs; leave it out to print one")
        hydra_app(_nothing, "train", argv)
        return 0
    resume = Resume.asked_for(args.overrides)
    if resume and args.multirun:
        raise ConfigError("resume: goes on with one run; leave out -m")
    if "hydra/launcher=slurm" in args.overrides and not args.multirun:
        raise ConfigError("hydra/launcher=slurm: Hydra launches jobs of a multirun only: add -m (it makes one job too)")
    if resume:
        argv = [a for a in argv if a not in args.overrides] + resume.overrides(args.overrides)
        args = arguments(argv)
    if not args.multirun:
        _check(args.overrides, args.config_dir, resume)
    hydra_app(lambda config: _task(config, resume), "train", argv)
    return 0


def _check(overrides: list[str], config_dir: str | None, resume: Resume | None) -> None:
    """Fail before Hydra makes a folder for a run that cannot work."""
    from grpocli.config.compose import build_run, compose

    config = compose([*search_path(config_dir), *overrides])
    build_run(resume.merged(config) if resume else config)


def _task(config: DictConfig, resume: Resume | None) -> float | None:
    from hydra.core.hydra_config import HydraConfig

    from grpocli.launch.run import launch

    folder = Path(HydraConfig.get().runtime.output_dir)
    if resume:
        resume.remember()
    return launch(resume.merged(config) if resume else config, folder, resuming=resume is not None)


def _nothing(config: DictConfig) -> None:
    """Hydra prints and does not run."""
