"""Teachers of a distillation: the models of `algorithm.kl.model`, and the check that their tokenizers are ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpocli.algorithm.kl import BUILT_IN, EVERY_TASK, key_of_teacher
from grpocli.config.parts import require
from grpocli.errors import ConfigError
from grpocli.models.loading import HuggingFace, ModelPart, Progress, load_config, load_model, load_tokenizer
from grpocli.models.tiny import Tiny

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpocli.algorithm.kl import KL

WARMER = {"warm_start_steps": 360, "noise": 0.0}
"""The warm start of the built-in teacher: twice the steps of the default model, and no wrong digits."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """One teacher."""

    key: str
    name: str
    """The value of the key."""
    tasks: tuple[str, ...]
    part: ModelPart

    def check_ready(self) -> None:
        """Raise ConfigError if its folder is missing or the hub does not answer. Loads nothing."""
        with self.errors():
            self.part.check_ready()

    def load(self) -> PreTrainedModel:
        """The model, as `load_model` loads it."""
        with self.errors():
            return load_model(self.part, self.part.prepare())

    @contextmanager
    def errors(self) -> Iterator[None]:
        """A block whose errors about `model.path` name the teacher's key."""
        try:
            yield
        except ConfigError as error:
            if error.key != "model.path":
                raise
            raise ConfigError(error.problem, key=self.key, value=self.name, hint=error.hint) from error


def check_tasks(kl: KL, tasks: list[str]) -> None:
    """Raise ConfigError unless each task has one teacher."""
    if EVERY_TASK not in kl.models:
        problem = f"must name a teacher for each task of this run ({', '.join(tasks)}), and none besides"
        require(kl, "model", kl.models.keys() == set(tasks), problem)


def teachers_of(kl: KL, student: Any) -> list[Teacher]:
    """The teachers that are loaded, each once. student: the run's choice of `model`, whose options they share."""
    tasks: dict[str, list[str]] = {}
    for task, name in kl.models.items() if kl.beta else ():
        tasks.setdefault(name, []).append(task)
    return [Teacher(key_of_teacher(own[0]), name, tuple(own), _part(name, student)) for name, own in tasks.items()]


def _part(name: str, student: Any) -> ModelPart:
    if name == BUILT_IN:
        problem = {"digits": student.digits, "operation": student.operation} if isinstance(student, Tiny) else {}
        return Tiny(**{"digits": 2, "operation": "+"} | problem | WARMER)  # type: ignore[arg-type]
    return HuggingFace(
        dtype=student.dtype,
        head_dtype=getattr(student, "head_dtype", None),
        attention=student.attention,
        path=name,
        trust_remote_code=getattr(student, "trust_remote_code", False),
    )


def check_tokenizers(
    teachers: list[Teacher], tokenizer: PreTrainedTokenizerBase, progress: Progress | None = None
) -> None:
    """Raise ConfigError unless every teacher has the policy's tokens and scores all of them. Loads no weights."""
    ours = tokenizer.get_vocab()
    for teacher in teachers:
        with teacher.errors():
            path = teacher.part.prepare(progress)
            theirs = load_tokenizer(teacher.part, path).get_vocab()
            scored = int(load_config(teacher.part, path).get_text_config().vocab_size)
        problem = difference(ours, theirs)
        if not problem and (largest := max(ours.values())) >= scored:
            problem = f"its vocab_size is {scored:,}, and the policy's tokenizer has the token {largest:,}"
        if problem:
            hint = "a teacher scores the policy's tokens: choose one with the same tokenizer"
            raise ConfigError(problem, key=teacher.key, value=teacher.name, hint=hint)


def difference(ours: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    """The first token, by its number, in which two vocabularies {token: number} differ, as a phrase; "" if none."""
    if ours == theirs:
        return ""
    token, number = min(ours.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))
    return f"its tokenizer is not the policy's: in one of them token {number:,} is {token!r}, and not in the other"
