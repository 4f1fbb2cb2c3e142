"""Whether a run is right, in the order of a run: as composed, its files, the devices, the model's files.

Every command goes as far as it needs; each check raises ConfigError.

A field alone is checked when its part is built, by `require` in `__post_init__`. The engine's `launch` and `connect`
check the servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import require
from grpocli.config.user_code import check_exists
from grpocli.hardware import Single
from grpocli.tasks.task import errors_below, key_of

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.rollout.engine import EnginePart
    from grpocli.views.view import View

FILES = ("tracker", "hardware", "engine", "model", "optim", "algorithm", "teacher", "data")
"""What `check_files` looks at, in its order: config groups, the teachers, and tasks with their rewards."""


def check_composed(run: Run) -> None:
    """Check keys against keys: `check_run(run)` of every part and section."""
    for field in fields(run):
        if field.name != "task":
            _call_all(getattr(run, field.name), "check_run", run)
    for name, task in run.tasks.items():
        with errors_below(key_of(run.task, name)):
            if check := getattr(task, "check_run", None):  # a class of a user may have none
                check(run)


def check_files(run: Run, training: bool = False) -> None:
    """Check files, packages and servers: `check_ready()` of every part. Imports no user code, loads no data.

    training: also what only a training needs, its callbacks and a token that may push it.
    """
    for name in FILES:
        check_file(run, name)
    if training:
        for spec in run.callbacks:
            check_exists(spec, "callbacks")
    if training and run.hub.push is not None:
        from grpocli.hub import PUSH_KEY, check_may_push

        check_may_push(PUSH_KEY, run.hub.push, run.hub.revision, private=run.hub.private)


def check_file(run: Run, name: str) -> None:
    """The check of one of FILES."""
    if name == "teacher":
        from grpocli.algorithm.kl import has_teacher

        if has_teacher(run.algorithm.kl):
            from grpocli.models.teacher import check_tasks, teachers_of

            check_tasks(run.algorithm.kl, list(run.tasks))
            for teacher in teachers_of(run.algorithm.kl, run.model):
                teacher.check_ready()
    elif name == "data":
        for one, task in run.tasks.items():
            with errors_below(key_of(run.task, one)):
                _call_all(task, "check_ready")
        _call_all(run.reward, "check_ready")
    else:
        _call_all(getattr(run, name), "check_ready")


def check_devices(run: Run, engine: EnginePart, processes: int) -> None:
    """Check keys against keys again, with the processes and the engine that the config left open.

    engine: the one that samples. processes: trainer processes on all machines.
    """
    hardware = replace(run.hardware, processes=processes) if isinstance(run.hardware, Single) else run.hardware
    train = replace(run.train, data_epochs=None)  # its steps are known by now
    check_composed(replace(run, engine=engine, hardware=hardware, train=train))


def check_model(run: Run, model_path: str, view: View) -> None:
    """Check what the model's config and tokenizer say, before weights are loaded. Makes the built-in teacher."""
    from grpocli.models.loading import check_vocabulary, load_config, load_tokenizer
    from grpocli.models.teacher import check_tokenizers, teachers_of
    from grpocli.training.router_balance import check_has_routers

    check_vocabulary(run.model, model_path)
    if run.hardware.context_parallel > 1:
        check_splits(run, load_config(run.model, model_path))
    if coefficient := run.algorithm.router_aux_loss_coef:
        check_has_routers(run.model, model_path, coefficient)
    kl = run.algorithm.kl
    if getattr(kl, "has_teacher", False) and kl.beta:
        view.stage("comparing the teacher's tokenizer with the policy's")
        tokenizer = load_tokenizer(run.model, model_path)
        check_tokenizers(teachers_of(kl, run.model), tokenizer, lambda fraction, text: view.stage(text, fraction))


def check_splits(run: Run, config: Any) -> None:
    """Require a model whose sequences `hardware.context_parallel` can split. config: the model's, of transformers."""
    from grpocli.models.shared_prompt_attention import supports

    hardware, n = run.hardware, run.hardware.context_parallel
    problem = "not every layer of this model is full attention, whose heads can be dealt out: set it to 1"
    require(hardware, "context_parallel", supports(config, run.rollout.longest_row), problem)
    heads = getattr(config.get_text_config(), "num_attention_heads", n)
    if isinstance(heads, int):  # otherwise each layer has its own, and the trial of the model decides
        problem = f"must divide the {heads} attention heads of this model"
        require(hardware, "context_parallel", heads % n == 0, problem)


def _call_all(value: object, method: str, *arguments: object) -> None:
    """Call a method, which parts of users may lack, of the parts and sections in a value: itself, and its fields."""
    if isinstance(value, Mapping):
        for one in value.values():
            _call_all(one, method, *arguments)
    elif is_dataclass(value):
        if found := getattr(value, method, None):
            found(*arguments)
        for field in fields(value):
            _call_all(getattr(value, field.name), method, *arguments)
