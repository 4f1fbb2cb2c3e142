"""`grpocli vllm-serve`: start a vLLM server for several runs."""

from __future__ import annotations

from omegaconf import DictConfig

from grpocli.cli.hydra_app import arguments, hydra_app, only_prints, options_first
from grpocli.errors import ConfigError


def main(argv: list[str]) -> int:
    """Serve until Ctrl-C. Returns the exit code."""
    argv = options_first(argv)
    args = arguments(argv)
    if args.multirun:
        raise ConfigError("vllm-serve starts one server", key="--multirun", hint="leave it out")
    if only_prints(args):
        hydra_app(lambda config: None, "vllm_serve", argv)
    else:
        hydra_app(_task, "vllm_serve", argv)
    return 0


def _task(config: DictConfig) -> int:
    from grpocli.rollout.vllm.config import check_vllm

    check_vllm("vllm")
    from grpocli.models.loading import choose_dtype
    from grpocli.rollout.vllm.external import build_server_config, serve
    from grpocli.rollout.vllm.server import check_port
    from grpocli.training.dequantized import dequantized_base
    from grpocli.views.live_view import status_view

    settings = build_server_config(config)
    if settings.port:
        check_port(settings.host, settings.port)
    view = status_view()
    try:
        view.stage("looking for the model")
        path = settings.model.prepare(lambda fraction, text: view.stage(text, fraction))
        dtype = choose_dtype(settings.model.dtype, settings.model, path, "auto")
        view.stage("starting vLLM")
        served = dequantized_base(settings.model, path, dtype)
        return serve(settings, path, dtype, view.progress, view.stop, served)
    finally:
        view.stop()
