"""The config group `optim`: optimizers of torch and bitsandbytes, and the schedule of their learning rate.

A schedule is a pure function of an update's number, so that a resume restores none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from grpocli.config.parts import one_of, part, require, section
from grpocli.config.user_code import choice_of
from grpocli.errors import ConfigError
from grpocli.models.quantization import check_bitsandbytes

if TYPE_CHECKING:
    import torch

    from grpocli.config.schema import Run

QUANTIZED_FROM, BLOCK = 4096, 256
"""bitsandbytes: numbers from which a state has 8 bits, and numbers that share a scale."""
MAPS = {"qmap1": "dynamic", "qmap2": "udynamic"}
"""Names in bitsandbytes' state and in the library of the values that 8 bits stand for: constants, for both moments."""

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}
"""The factor of the learning rate for the share of the updates after the warm-up that is done."""


class StateTensor(NamedTuple):
    """A tensor of an optimizer's state. size: bytes of a number."""

    shape: tuple[int, ...]
    size: int = 4


@section("optim")
class Optimizer:
    """Base class of the config group `optim`."""

    lr: float = 1e-6
    """Learning rate of an update, after the warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay: the share of a weight that an update takes away, times the learning rate."""
    warmup_steps: int = 0
    """Number of updates over which the learning rate rises linearly from 0."""
    schedule: str = "constant"
    """After the warm-up: `constant`, or `linear` or `cosine` towards 0, which is reached one update after the last."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this Euclidean norm over all weights; 0: never."""

    parallel: ClassVar[tuple[str, ...]] = ("ddp", "fsdp2", "zero3")
    """The choices of hardware.parallel that it works with."""

    def __post_init__(self) -> None:
        require(self, "lr", 0 <= self.lr < math.inf, "must be a finite number of 0 or more")
        require(self, "weight_decay", 0 <= self.weight_decay < math.inf, "must be a finite number of 0 or more")
        require(self, "warmup_steps", self.warmup_steps >= 0, "must be 0 or more")
        one_of(self, "schedule", SCHEDULES)
        require(self, "max_grad_norm", self.max_grad_norm >= 0, "must be 0 (no clipping) or more")

    def make(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over the parameters with gradients."""
        raise NotImplementedError

    def make_for(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a model, for optimizers that treat its layers differently."""
        return self.make(model.parameters())

    def state_of(self, shape: tuple[int, ...], in_layers: bool) -> Mapping[str, StateTensor]:
        """The state of a parameter by name. in_layers: whether it is a matrix between embedding and output head."""
        raise NotImplementedError

    def rate(self, update: int, total: int) -> float:
        """The learning rate of update number `update` (from 0) of `total`: a pure function, without state to save.

        In the warm-up it rises linearly to `lr`, and is never 0. After it the schedule is transformers'.
        """
        warmup = self.warmup_steps
        if update < warmup:
            return self.lr * (update + 1) / (warmup + 1)
        return self.lr * SCHEDULES[self.schedule]((update - warmup) / max(total - warmup, 1))

    def check_run(self, run: Run) -> None:
        """Require weights that its state is sharded with."""
        parallel = run.hardware.parallel
        if parallel not in self.parallel:
            problem = f"works with hardware.parallel={' or '.join(self.parallel)}, not {parallel}"
            raise ConfigError(problem, key="optim", value=choice_of("optim", self))

    def groups(self, parameters: Iterable[torch.nn.Parameter]) -> list[dict[str, Any]]:
        """The parameters with gradients in groups: norms and biases have no weight decay."""
        trained = [p for p in parameters if p.requires_grad]
        dims = {p: len(getattr(p, "ds_shape", p.shape)) for p in trained}  # ZeRO-3 flattens weights
        groups = [
            {"params": [p for p in trained if dims[p] >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if dims[p] < 2], "weight_decay": 0.0},
        ]
        return [g for g in groups if g["params"]]


@section("optim")
class Adam(Optimizer):
    """Base class of optimizers with Adam's two moments."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates, per update, of the first and the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self,
            "betas",
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            "must be two numbers of at least 0 and below 1",
        )
        require(self, "eps", self.eps > 0, "must be above 0")

    def state_of(self, shape: tuple[int, ...], in_layers: bool) -> Mapping[str, StateTensor]:
        return {"step": StateTensor(()), "exp_avg": StateTensor(shape), "exp_avg_sq": StateTensor(shape)}


@part("optim", "adamw")
class AdamW(Adam):
    """AdamW (arXiv 1711.05101) on float32 weights."""

    def make(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        import torch

        return torch.optim.AdamW(self.groups(parameters), lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


@part("optim", "adamw_8bit")
class AdamW8bit(Adam):
    """AdamW with moments of 8 bits, in blocks of 256 numbers with a common scale (arXiv 2110.02861); bitsandbytes'.

    Tensors of fewer than 4,096 numbers have moments in float32.
    """

    parallel: ClassVar[tuple[str, ...]] = ("ddp",)

    def check_ready(self) -> None:
        """Raise ConfigError if bitsandbytes is not installed."""
        check_bitsandbytes("optim", "adamw_8bit")

    def make(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        from bitsandbytes.optim import AdamW8bit

        class WithoutConstants(AdamW8bit):  # type: ignore[misc]
            """Its state holds constants during an update only: checkpoints would repeat them."""

            def update_step(self, group: dict[str, Any], p: Any, gindex: int, pindex: int) -> None:
                state = self.state[p]
                for name, kind in MAPS.items():
                    self.name2qmap[kind] = state[name] = self.name2qmap[kind].to(p.device)
                super().update_step(group, p, gindex, pindex)
                for name in MAPS:
                    del state[name]

        options = {"lr": self.lr, "betas": self.betas, "eps": self.eps, "min_8bit_size": QUANTIZED_FROM}
        made: torch.optim.Optimizer = WithoutConstants(self.groups(parameters), **options)
        return made

    def state_of(self, shape: tuple[int, ...], in_layers: bool) -> Mapping[str, StateTensor]:
        step, count = {"step": StateTensor((), 8)}, math.prod(shape)
        if count < QUANTIZED_FROM:
            return step | {"state1": StateTensor(shape), "state2": StateTensor(shape)}
        moments = {f"state{i}": StateTensor(shape, 1) for i in (1, 2)}
        scales = {f"absmax{i}": StateTensor((-(-count // BLOCK),)) for i in (1, 2)}
        return step | moments | scales


@part("optim", "muon")
class Muon(Adam):
    """Muon (Jordan et al. 2024; torch's) for matrices in the layers; AdamW for embedding, head, norms and biases.

    Updates of matrices have AdamW's size (arXiv 2502.16982), and so its learning rates. The experts of a mixture, which
    transformers keeps as one tensor with three dimensions, are AdamW's too.
    """

    momentum: float = 0.95
    """Decay rate, per update, of the average gradient of a matrix."""
    nesterov: bool = True
    """Step along the gradient beside its average, instead of along the average alone."""

    parallel: ClassVar[tuple[str, ...]] = ("ddp", "fsdp2")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "momentum", 0 <= self.momentum < 1, "must be at least 0 and below 1")

    def make_for(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        import torch

        names = matrices_in_layers(model)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        parts: list[torch.optim.Optimizer] = []
        if matrices := [p for name, p in trained if name in names]:
            options: Any = {"momentum": self.momentum, "nesterov": self.nesterov, "adjust_lr_fn": "match_rms_adamw"}
            parts.append(torch.optim.Muon(matrices, lr=self.lr, weight_decay=self.weight_decay, **options))
        if groups := self.groups(p for name, p in trained if name not in names):
            parts.append(torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True))
        return combine(parts)

    def state_of(self, shape: tuple[int, ...], in_layers: bool) -> Mapping[str, StateTensor]:
        if in_layers:
            return {"momentum_buffer": StateTensor(shape)}
        return super().state_of(shape, in_layers)


@part("optim", "sgd")
class Sgd(Optimizer):
    """Stochastic gradient descent (torch's); without momentum it has no state."""

    lr: float = 0.01
    """Learning rate of an update, after the warm-up. Gradients are not divided by their size, so it is larger than
    AdamW's."""
    momentum: float = 0.0
    """Decay rate, per update, of the summed gradients; 0: none. Above it, weight decay is summed with them."""

    parallel: ClassVar[tuple[str, ...]] = ("ddp", "fsdp2")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "momentum", 0 <= self.momentum < 1, "must be at least 0 and below 1")

    def make(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        import torch

        return torch.optim.SGD(self.groups(parameters), lr=self.lr, momentum=self.momentum)

    def state_of(self, shape: tuple[int, ...], in_layers: bool) -> Mapping[str, StateTensor]:
        return {"momentum_buffer": StateTensor(shape)} if self.momentum else {}


def make_optimizer(part: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a choice of `optim`; parts of users may have only `make(parameters)`."""
    return part.make_for(model) if isinstance(part, Optimizer) else part.make(model.parameters())


def combine(parts: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """One optimizer that steps several with different parameters. It shares their groups, and one state with all."""
    import torch

    class Combined(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__([group for one in parts for group in one.param_groups], {})
            groups = iter(self.param_groups)
            for one in parts:
                one.param_groups = [next(groups) for _ in one.param_groups]
                one.state = self.state

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for one in parts:
                one.step()

    return Combined()


def matrices_in_layers(model: torch.nn.Module) -> set[str]:
    """The names of the weights with two dimensions that are neither the embedding nor the output head."""
    import torch

    ends = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, torch.nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    ends |= {f"{name}.weight" for name, module in model.named_modules() if module is head}
    return {name for name, p in model.named_parameters() if p.ndim == 2 and name not in ends}
