"""Operations, dispatched calls and launches of one update, counted on a CPU: no GPU, no weights, no numbers.

    python bench/operations.py [WORKLOAD ...] [KEY=VALUE ...] [--path gpu|cpu] [--layers N] [--where N]

The whole of `Updater.train_step` runs, with the models, the layout and the trials that `build_trainer.py` chooses for
the device, on fake tensors: they have shapes and no numbers, and say that they are on a GPU. Tensors of the CPU stay
real, so collation and copies are those of a run. WORKLOAD: `built-in` (the default run), or one of
bench/side_by_side/workloads.py. --where: the lines with most dispatched calls.

operations: the calls that torch's dispatcher records, nested ones too: what torch.profiler counts as `aten::...`.
dispatched: the calls that reach a kernel: what a TorchDispatchMode sees.
launches: the dispatched calls that run a kernel on the GPU: not views, allocations, copies from or to the CPU. One for
each, also for those that run several (attention's backward pass runs three), and for a kernel of Triton or of flex
attention.
Layers are eager, also where a GPU compiles them. Without --path: of GPUs, and for the default run of CPUs too.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.profiler import ProfilerConfig, ProfilerState
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoConfig, AutoModelForCausalLM

from grpocli.composition.compose import build_run, compose
from grpocli.distributed.parallel import Parallel
from grpocli.distributed.world import World
from grpocli.hardware import Single
from grpocli.models import flex_attention
from grpocli.training import build_trainer, trials
from grpocli.training.checkpoint import State
from grpocli.types import Row

sys.path.insert(0, str(Path(__file__).parent / "side_by_side"))
from workloads import ALL, MODELS

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
BUILT_IN = "built-in"
DEFAULT = (BUILT_IN, "0.5B, even", "0.5B, skewed", "1.5B, even", "1.5B, skewed")
GIVEN = ("algorithm=grpo", "algorithm.kl.beta=0", "algorithm/aggregate=token_mean")
"""The algorithm of bench/side_by_side."""
ALLOCATIONS = (
    "empty",
    "new_empty",
    "detach",
    "lift_fresh",
    "alias",
    "_unsafe_view",
    "_local_scalar_dense",
    "is_pinned",
)
"""Names, or their beginnings, of operations that run no kernel, though their results are no views."""
PINNED = ("is_pinned", "pin_memory", "_pin_memory", "empty", "copy_")
"""The operations of `Tensor.pin_memory`, which a machine without a GPU does not have."""
OWN_CODE = re.compile("/(?:grpocli|transformers/models)/(.*)")
NESTED_IN_ATTENTION = {True: 25, False: 36}
"""Operations within a call of `sdpa` and within its backward pass, on a GPU or not: of two updates profiled on an H100
(50,076 operations of the built-in model and 171,049 of 0.5B, commit 5cce571c), and of the default run on a CPU.
"""
aten, OWN_DEVICE = torch.ops.aten, FakeTensor.device.fget


@dataclass
class Found:
    """The counts of an update. calls: dispatched, by operation and by line."""

    operations: int = 0
    dispatched: int = 0
    launches: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)


class Counted(TorchDispatchMode):
    """Counts what is dispatched, and lets fake tensors stand for those of a GPU."""

    def __init__(self, gpu: bool) -> None:
        super().__init__()
        self.gpu, self.counting, self.inside = gpu, False, 0
        self.found, self.nested, self.samples = Found(), Counter[Any](), dict[Any, Any]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        torch._C._autograd._enable_record_function(False)
        self.inside += 1
        try:
            return self.run(function, args, kwargs)
        finally:
            self.inside -= 1
            torch._C._autograd._enable_record_function(True)

    def run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if function.namespace in ("prim", "profiler"):  # a tensor's device; marks
            return function(*args, **kwargs)
        to_gpu = getattr(kwargs.get("device"), "type", "cpu") == "cuda"
        ours = any(isinstance(one, FakeTensor) for one in tree_leaves((args, kwargs)))
        if to_gpu:
            kwargs["device"] = CPU
            if ours and kwargs.get("dtype", args[0].dtype) == args[0].dtype and function is aten._to_copy.default:
                return aten.alias.default(args[0])  # it is there already
        if function is aten._local_scalar_dense.default and ours:
            self.count(function, args, kwargs, 0)
            return 1.0 if args[0].is_floating_point() else 1
        if ours and function is aten.equal.default:  # of a trial at the start
            return True
        if ours and function is aten.index.Tensor and getattr(args[1][0], "dtype", None) == torch.bool:  # the same
            return args[0].reshape(-1)
        with nullcontext() if ours or to_gpu else unset_fake_temporarily():
            result = function(*args, **kwargs)
        copied = to_gpu and not ours and function is aten._to_copy.default
        on_gpu = (ours or to_gpu) and self.gpu and not copied
        self.count(function, args, kwargs, int(on_gpu and runs_kernel(function)))
        return result

    def count(self, function: Any, args: Any, kwargs: Any, launched: int) -> None:
        if not self.counting:
            return
        name = str(function)
        self.found.dispatched += 1
        self.found.calls[name] += 1
        self.found.places[place()] += 1
        if "flash_attention_for_cpu" in name:  # stands for the kernels of GPUs, too
            self.found.operations += NESTED_IN_ATTENTION[self.gpu]
        if not nests(function):
            self.found.launches += launched
        else:
            self.nested[function, launched] += 1
            if function not in self.samples:
                with unset_fake_temporarily():
                    self.samples[function] = tree_map(on_meta, (args, kwargs))

    @contextmanager
    def making(self) -> Iterator[None]:
        """A block that makes fake tensors."""
        self.inside += 1
        with _disable_current_modes():
            yield
        self.inside -= 1

    def launched(self) -> None:
        """A kernel of Triton is called, which no dispatcher sees."""
        if self.counting:
            self.found.launches += 1

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.counting:
            self.found.dispatched += 2
            self.found.operations += len(PINNED)
            self.found.places[place()] += 2
        return tensor

    def device_of(self, tensor: Any) -> torch.device:
        return OWN_DEVICE(tensor) if self.inside else GPU


def on_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


@cache
def is_kernel(name: str) -> bool:
    """Whether an operation runs a kernel of its own, by its schema: the others are views and allocations."""
    schemas = [getattr(getattr(aten, name), one)._schema for one in getattr(aten, name).overloads()]
    views = (out.alias_info for schema in schemas for out in schema.returns)
    return not any(one is not None and not one.is_write for one in views) and not name.startswith(ALLOCATIONS)


def runs_kernel(function: Any) -> bool:
    return function.namespace != "aten" or is_kernel(function._schema.name.removeprefix("aten::"))


@cache
def nests(function: Any) -> bool:
    """Whether an operation consists of others, on every device."""
    key = "CompositeExplicitAutograd"
    return function.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), key)


def recorded(call: Any) -> list[str]:
    """The operations that the dispatcher records during a call, without `aten::`."""
    # torch's newer profiler prints two lines to the terminal at each use, and takes three times as long
    more = torch._C._profiler._ExperimentalConfig()
    quiet = ProfilerConfig(ProfilerState.CPU, *5 * [False], more)
    torch.autograd._enable_profiler_legacy(quiet)
    try:
        call()
    finally:
        threads = torch.autograd._disable_profiler_legacy()
    names = (one.name() for events in threads for one in events if one.kind() == "push")
    return [name.removeprefix("aten::") for name in names if name.startswith("aten::")]


def place() -> str:
    """The line of grpocli or of the model, or the operation whose backward pass it is."""
    if node := torch._C._current_autograd_node():
        return f"backward: {node.name()}"
    frame: Any = sys._getframe(3)
    while frame and not (found := OWN_CODE.search(frame.f_code.co_filename)):
        frame = frame.f_back
    return f"{found[1]}:{frame.f_lineno} {frame.f_code.co_name}" if frame else "?"


@contextmanager
def standing_in(mode: Counted) -> Iterator[None]:
    """A block in which fake tensors are those of a GPU, and kernels that only a GPU has are one call each way."""

    def tolist(tensor: Any) -> Any:
        mode.count(aten._local_scalar_dense.default, (), {}, 0)
        with unset_fake_temporarily():
            return torch.ones(tensor.shape).tolist()

    def cpu(tensor: Any) -> Any:
        with unset_fake_temporarily():
            return torch.ones(tensor.shape, dtype=tensor.dtype)

    def autocast(device: str = "cpu", *args: Any, **kwargs: Any) -> Any:
        return plain(kwargs.pop("device_type", device).replace("cuda", "cpu"), *args, **kwargs)

    plain, enabled, dtype = torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype
    with ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(owner, name, value, create=True))

        put(FakeTensor, "tolist", tolist)
        put(FakeTensor, "cpu", cpu)
        if mode.gpu:
            put(FakeTensor, "device", property(mode.device_of))
            put(FakeTensor, "is_cuda", property(lambda one: mode.device_of(one).type == "cuda"))
            put(torch.Tensor, "pin_memory", lambda one: mode.pinned(one))
            put(torch, "autocast", autocast)
            put(torch, "is_autocast_enabled", lambda device="cpu": enabled(device.replace("cuda", "cpu")))
            put(torch, "get_autocast_dtype", lambda device: dtype(device.replace("cuda", "cpu")))
            put(torch.utils._foreach_utils, "_get_foreach_kernels_supported_devices", lambda: ["cpu", "cuda"])
            put(flex_attention, "_kernel", lambda: attention)
            if find_spec("triton"):
                from triton.runtime.jit import JITFunction

                put(JITFunction, "run", lambda *_, **__: mode.launched())
        yield


def attention(query: Any, key: Any, value: Any, *, scale: Any = None, **others: Any) -> Any:
    """In place of flex attention: the same shapes, one call each way."""
    return aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[0]


def rows_of(name: str, step: int = 1) -> tuple[list[Row], int]:
    """The rows of a workload and the number of its groups; those of the default run have its lengths."""
    draw = random.Random(step)
    if name == BUILT_IN:
        groups, prompt = 32, 10
        completions = [[[5] * n for n in draw.choices((3, 4), (3, 5), k=8)] for _ in range(groups)]
    else:
        work = ALL[name]
        groups, prompt, completions = work.groups, work.prompt, work.completions(step)
    return [
        Row([3 + group] * prompt, ids, [1] * len(ids), draw.choice((-1.0, 1.0)), group, [-1.0] * len(ids))
        for group, of_group in enumerate(completions)
        for ids in of_group
    ], groups


def config_of(name: str, layers: int | None, overrides: Sequence[str] = ()) -> tuple[Any, Any]:
    """The run and the model's config."""
    if name == BUILT_IN:
        from grpocli_tools.plan.model_size import find_config

        run = build_run(compose([*overrides]))
        config = find_config(run.model)[0]
    else:
        work = ALL[name]
        sizes = [f"rollout.prompts_per_step={work.groups}", f"rollout.group_size={work.rows}"]
        sizes += [f"rollout.max_prompt_tokens={work.prompt}", f"rollout.max_completion_tokens={work.longest}"]
        sizes += [f"train.micro_batch_tokens={work.micro_batch}"]
        run = build_run(compose([*GIVEN, *sizes, "model.compile=false", *overrides]))
        given = dict(MODELS[work.model])
        config = AutoConfig.for_model(given.pop("model_type"), **given)
    if layers:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    return run, config


def counted(name: str, gpu: bool = True, layers: int | None = None, overrides: Sequence[str] = ()) -> Found:
    """The counts of a workload's second update. layers: of the model, instead of all."""
    run, config = config_of(name, layers, overrides)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    mode, device = Counted(gpu), GPU if gpu else CPU

    def model(*_: Any, **__: Any) -> Any:
        with mode.making(), fake:
            made: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        made.to = lambda *_, **__: made
        return made

    world = World(Single(device="cpu"))
    world.device, world.parallel, world.any = device, Parallel(device), bool
    dtype = "float32" if name == BUILT_IN and not gpu else "bfloat16"
    job: Any = SimpleNamespace(model_path="", dtype=dtype)
    with patch.multiple(build_trainer, load_policy=model, load_model=model), standing_in(mode), fake, mode:
        updater = build_trainer.load_updater(run, job, world, None, State(), lambda *_, **__: None)
        for note in trials.choose_layout(run, world, updater.policy, updater.reference):
            print(note, file=sys.stderr)
        rows, groups = rows_of(name)
        updater.train_step([row for row in rows_of(name)[0] if row.group == 0], 1, 1)  # makes the optimizer's state
        mode.counting, found = True, mode.found
        names = recorded(partial(updater.train_step, rows, groups, 2))
        found.operations += len(names)
    for (function, launched), number in mode.nested.items():
        args, kwargs = mode.samples[function]
        names = recorded(partial(function, *args, **kwargs))[1:]
        found.operations += number * len(names)
        found.launches += number * launched * sum(map(is_kernel, names))
    return found


def of_all_layers(name: str, gpu: bool = True, overrides: Sequence[str] = ()) -> Found:
    """The counts of a workload's update, from models of one and of two layers: each further layer adds as many."""
    layers = config_of(name, None)[1].num_hidden_layers
    one, two = (counted(name, gpu, number, overrides) for number in (1, 2))

    def at(first: Any, second: Any) -> Any:
        return first + (layers - 1) * (second - first)

    return Found(
        *(at(getattr(one, key), getattr(two, key)) for key in ("operations", "dispatched", "launches")),
        *(
            Counter({text: at(a[text], b[text]) for text in a | b})
            for a, b in ((one.calls, two.calls), (one.places, two.places))
        ),
    )


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("words", nargs="*", metavar="WORKLOAD | KEY=VALUE")
    cli.add_argument("--path", choices=("gpu", "cpu"))
    cli.add_argument("--layers", type=int, help="count a model of so many, instead of extending one and two layers")
    cli.add_argument("--where", type=int, default=0, metavar="N")
    args = cli.parse_intermixed_args()
    overrides = [word for word in args.words if "=" in word]
    names = [word for word in args.words if "=" not in word] or DEFAULT
    print("| update, path | operations | dispatched | launches |\n|---|---|---|---|")
    for name in names:
        for path in [args.path] if args.path else ["gpu", "cpu"] if name == BUILT_IN else ["gpu"]:
            gpu = path == "gpu"
            found = counted(name, gpu, args.layers, overrides) if args.layers else of_all_layers(name, gpu, overrides)
            launched = f"{found.launches:,}" if path == "gpu" else ""
            print(f"| {name}, {path} | {found.operations:,} | {found.dispatched:,} | {launched} |", flush=True)
            for kind in (found.places, found.calls) if args.where else ():
                for text, count in kind.most_common(args.where):
                    print(f"  {count:6,}  {text}")


if __name__ == "__main__":
    main()
