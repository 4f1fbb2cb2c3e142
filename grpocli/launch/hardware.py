"""Where a run runs."""

from __future__ import annotations

from grpocli.config.parts import one_of, part, require


@part("hardware", "single")
class Single:
    """One machine.

    processes: trainer processes; any number works. device: `auto` is a GPU where there is one. parallel: how the
    processes share the update.
    timeout: seconds that a process waits for the others before the run stops.
    """

    processes: int = 1
    device: str = "auto"
    parallel: str = "ddp"
    timeout: int = 1800

    def __post_init__(self) -> None:
        require(self, "processes", 1 <= self.processes <= 1024, "must be between 1 and 1024")
        one_of(self, "device", ("auto", "cpu", "cuda"))
        one_of(self, "parallel", ("ddp",))
        require(self, "timeout", self.timeout >= 1, "must be at least 1 second")
