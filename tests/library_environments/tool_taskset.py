"""A taskset of verifiers with tools for tests: a toolset of each episode, with its state, and one of all episodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf


class SumState(vf.State):
    added: int = 0


class Sums(vf.Toolset[vf.ToolsetConfig, SumState]):
    """Tools of one episode."""

    TOOL_PREFIX = None

    async def setup_task(self, task: SumData) -> None:
        self.secret = task.answer

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        self.state.added += 1
        return a + b

    @vf.tool
    async def fail(self, how: str) -> str:
        """Fail in a way."""
        raise RuntimeError(f"cannot {how}")


class SumToolset(Sums):
    """The same, with a tool that another task does not have."""

    @vf.tool
    def answer(self) -> str:
        """Tell the answer."""
        return self.secret


class NotesConfig(vf.SharedToolsetConfig):
    pass


class Notes(vf.Toolset[NotesConfig, SumState]):
    """A tool of all episodes, whose state is the calling episode's."""

    async def setup(self) -> None:
        self.calls = 0

    @vf.tool
    def note(self, text: str) -> str:
        """Note a text."""
        self.calls += 1
        self.state.added += 10
        return f"noted {text}"


class SumData(vf.TaskData):
    answer: str


class SumTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumTask(vf.Task[SumData, SumState, SumTaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.125)
    async def added(self, trace: vf.Trace) -> float:
        return float(trace.state.added)

    @classmethod
    def toolsets(cls, config: SumTaskConfig) -> list[vf.Toolset]:
        return [Sums(config.tools)]


class OtherTask(SumTask):
    @classmethod
    def toolsets(cls, config: SumTaskConfig) -> list[vf.Toolset]:
        return [SumToolset(config.tools)]


class SumConfig(vf.TasksetConfig):
    task: SumTaskConfig = SumTaskConfig()
    others: bool = False
    notes: NotesConfig = NotesConfig()


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    """Endless; with `others`, the second task has other tools than the first."""

    INFINITE = True

    def load(self) -> Iterator[SumTask]:
        for i in itertools.count(1):
            kind = OtherTask if self.config.others and i == 2 else SumTask
            yield kind(SumData(prompt=f"{i}+{i}=", answer=str(i + i)), self.config.task)

    @classmethod
    def toolsets(cls, config: SumConfig) -> list[vf.Toolset]:
        return [Notes(config.notes)]


__all__ = ["SumTaskset"]
