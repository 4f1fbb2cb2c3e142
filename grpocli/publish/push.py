"""`hub.push` and `grpocli push`: a run's folder as a model repository on the hub.

The final model is at the repository's root, where transformers looks for it; everything else has the path that it has
in the run's folder, so that `resume=hub:OWNER/NAME` finds a run. A push uploads only what the repository lacks. Texts
are pushed without secrets and local folders (tracking/published.py).
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from grpocli.composition.compose import register_parts
from grpocli.errors import ConfigError
from grpocli.files import regular
from grpocli.hub import PUSH_KEY, check_may_push, hub_api, hub_errors
from grpocli.plugins import hook
from grpocli.progress import Progress, unreported
from grpocli.publish.published import Publisher
from grpocli.runs.run_dir import RunDir
from grpocli.runs.sessions import run_id

if TYPE_CHECKING:
    from grpocli.config.schema import Hub

TEXTS = ("config.yaml", "sessions.jsonl", "metrics.jsonl", "summary.json")
"""The files of a run, beside its folders, that are pushed."""
CARD = "README.md"
NEW = {".gitattributes", CARD}
"""The files that the hub makes itself in a new repository."""
CHECKSUMS = "checksums.json"
REPORT = "report.html"
COMMIT_FILES = 100
"""Most files of a commit; the hub advises no more."""
HERE = "PATH_TO_THIS_FOLDER"
"""Stands in the model card for the model's folder."""


@dataclass(frozen=True, slots=True)
class Content:
    """The file `path` of the repository: a file of this machine, or bytes."""

    path: str
    source: Path | bytes


@dataclass(frozen=True, slots=True)
class Pusher:
    """Pushes a run's folder to `hub.push`. key: of errors."""

    run_dir: RunDir
    hub: Hub
    key: str = PUSH_KEY
    api: Any = field(default_factory=hub_api)

    @property
    def repo(self) -> str:
        assert self.hub.push is not None
        return self.hub.push

    def push(self, progress: Progress = unreported) -> str:
        """Push everything that `hub` asks for and that the repository lacks. Returns the repository's address.

        Safe to repeat: files that are there already are not sent again. Raises ConfigError, in one sentence.
        """
        register_parts()  # which know the keys of a config that hold no secrets
        commits = [*self._rollouts(), *self._checkpoints(), self._model()]
        if not any(commits):
            raise ConfigError("has neither a final model nor a checkpoint yet", key="RUN", value=self.run_dir.path)
        check_may_push(self.key, self.repo, self.hub.revision, private=self.hub.private)
        refuse_other_run(self.key, self.hub, self.run_dir)
        with hub_errors(self.key, self.repo):
            for done, contents in enumerate(commits):
                progress(done, len(commits), "parts")
                self._commit(f"grpocli: {self.run_dir.name}", [*self._texts(), *contents])
        return f"{self.api.endpoint}/{self.repo}"

    def push_checkpoint(self, folder: Path, step: int) -> None:
        """Push a checkpoint, with the texts that a resume needs, and delete those that the run has deleted.

        folder: the checkpoint, or a copy of it.
        """
        with hub_errors(self.key, self.repo):
            name = self.run_dir.checkpoint(step).name
            self._commit(f"grpocli: {name}", [*self._texts(), *self._checkpoint(folder, name)], prune=True)

    def _texts(self) -> list[Content]:
        publish = Publisher.of_file(self.run_dir.config, self.run_dir.path)
        paths = [self.run_dir.path / name for name in TEXTS if (self.run_dir.path / name).is_file()]
        return [Content(path.name, publish(regular(path).read_text(errors="replace")).encode()) for path in paths]

    def _rollouts(self) -> Iterator[list[Content]]:
        files = _files(self.run_dir.rollouts(0).parent, "rollouts") if self.hub.rollouts else []
        yield from (files[start : start + COMMIT_FILES] for start in range(0, len(files), COMMIT_FILES))

    def _checkpoints(self) -> Iterator[list[Content]]:
        for path in self._kept() if self.hub.checkpoints else []:
            yield self._checkpoint(path, path.name)

    def _checkpoint(self, folder: Path, name: str) -> list[Content]:
        """The files of a checkpoint. Configs without local folders get their own checksums, which a resume checks."""
        below = f"checkpoints/{name}"
        contents = self._published(_files(folder, below))
        index = folder / CHECKSUMS
        changed = [one for one in contents if isinstance(one.source, bytes)]
        if not changed or not index.is_file():
            return contents
        sums = json.loads(regular(index).read_text())
        for one in changed:
            assert isinstance(one.source, bytes)
            digest = xxhash.xxh3_128(one.source).hexdigest()
            sums[one.path.removeprefix(f"{below}/")] = [len(one.source), digest]
        kept = [one for one in contents if one.path != f"{below}/{CHECKSUMS}"]
        return [*kept, Content(f"{below}/{CHECKSUMS}", json.dumps(sums, indent=2).encode())]

    def _published(self, contents: Sequence[Content]) -> list[Content]:
        """The same files, of which configs have no local folders: peft writes that of an adapter's base model."""
        publish = Publisher.of_file(self.run_dir.config, self.run_dir.path)
        found = []
        for one in contents:
            if isinstance(one.source, Path) and one.path.endswith("config.json"):
                text = regular(one.source).read_text()
                one = one if publish(text) == text else Content(one.path, publish(text).encode())
            found.append(one)
        return found

    def _model(self) -> list[Content]:
        """The final model with its card, and the report; nothing before the run has a model."""
        model = self.run_dir.model
        if not model.is_dir():
            return []
        publish = Publisher.of_file(self.run_dir.config, self.run_dir.path)
        card = regular(model / CARD).read_text() if (model / CARD).is_file() else ""
        card = publish(card).replace(HERE, self.repo)
        files = [content for content in self._published(_files(model, "")) if content.path != CARD]
        made_page = hook("report_page")
        if made_page is None:
            return [*files, Content(CARD, card.encode())]
        ended = self.run_dir.summary if self.run_dir.summary.is_file() else self.run_dir.config
        # the date of the run's end, so that a repeated push has the same page
        made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(ended.stat().st_mtime))
        page = publish(made_page([self.run_dir.path], made=made))
        return [*files, Content(REPORT, page.encode()), Content(CARD, card.encode())]

    def _commit(self, message: str, contents: Sequence[Content], prune: bool = False) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        # rollouts belong to this model: they are no data set of their own
        warnings.filterwarnings("ignore", message="It seems that you are about to commit a data file")
        gone = sorted(self._pushed_checkpoints() - {path.name for path in self._kept()}) if prune else []
        added = [CommitOperationAdd(one.path, one.source) for one in contents]
        deleted = [CommitOperationDelete(f"checkpoints/{name}/", is_folder=True) for name in gone]
        self.api.create_commit(self.repo, [*added, *deleted], commit_message=message, revision=self.hub.revision)

    def _kept(self) -> list[Path]:
        """The run's checkpoints. Imported here, as torch comes with them."""
        from grpocli.training.resume_point import checkpoints

        return checkpoints(self.run_dir.checkpoints)

    def _pushed_checkpoints(self) -> set[str]:
        files = self.api.list_repo_files(self.repo, revision=self.hub.revision)
        return {path.split("/")[1] for path in files if path.startswith("checkpoints/")}


def _files(folder: Path, below: str) -> list[Content]:
    """The files below a folder, without hidden ones. below: their folder in the repository."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    names = [path.relative_to(folder).as_posix() for path in paths]
    return [Content(f"{below}/{name}" if below else name, path) for name, path in zip(names, paths, strict=True)]


def refuse_other_run(key: str, hub: Hub, run_dir: RunDir) -> None:
    """Raise ConfigError if the repository holds another run or a model, whose files would mix with this run's.

    Also if the hub does not say what it holds.
    """
    if hub.push is None:
        return
    from huggingface_hub import hf_hub_download

    hint = "choose another name, or a new branch with hub.revision=BRANCH"
    with hub_errors(key, hub.push):
        files = set(hub_api().list_repo_files(hub.push, revision=hub.revision))
        if run_dir.sessions.name not in files:
            if files - NEW:
                raise ConfigError("holds files that are no run of grpocli", key=key, value=hub.push, hint=hint)
            return
        sessions = hf_hub_download(hub.push, run_dir.sessions.name, revision=hub.revision)
        if run_id(RunDir(Path(sessions).parent)) != run_id(run_dir):
            raise ConfigError("holds another run", key=key, value=hub.push, hint=hint)
