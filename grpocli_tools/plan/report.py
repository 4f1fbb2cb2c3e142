"""A plan as text and as JSON, and changes that may make it fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from grpocli.errors import ConfigError
from grpocli.text import counted
from grpocli_tools.console import CleanConsole
from grpocli_tools.plan.resources import GIB
from grpocli_tools.plan.sweep import FULL
from grpocli_tools.plan.times import COSTS, DECODE_COSTS, LINK

if TYPE_CHECKING:
    from grpocli_tools.plan.memory import Device
    from grpocli_tools.plan.plan import Plan
    from grpocli_tools.plan.sweep import Sweep

WIDTH = 120
LARGE_MICRO_BATCH = 32_768
"""Tokens of a micro-batch with which an H100 waited little for the host."""
Again = Callable[[list[str]], "Plan"]
"""Makes a plan with further overrides."""


def as_text(plan: Plan, title: str, advice: Sequence[str]) -> str:
    """The model, a table per kind of device, the work of a step, the assumptions and the advice."""
    return _text_of(
        _bold(f"grpocli plan {title}".rstrip()),
        *_pairs(facts(plan)),
        *(part for device in plan.devices for part in _device(device)),
        _bold("\none step, with all prompts and completions of full length"),
        *_pairs(step_facts(plan)),
        *_list("assumed", assumptions(plan)),
        _bold(f"\n{verdict(plan)}"),
        *_list("keys to change", advice),
    )


def _text_of(*parts: Text | Table) -> str:
    """The parts as text; only tables are cut to the width."""
    out = CleanConsole(width=WIDTH)
    with out.capture() as captured:
        for part in parts:
            out.print(part, soft_wrap=isinstance(part, Text))
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def as_dict(plan: Plan, advice: Sequence[str]) -> dict[str, Any]:
    """Every figure, in bytes, FLOPs and seconds."""
    size = plan.size
    sizes = {
        f.name: getattr(size, f.name) for f in dataclasses.fields(size) if f.name not in ("config", "trained_shapes")
    }
    return {
        "fits": plan.fits,
        "model": sizes | {"dtype": plan.dtype},
        "devices": [dataclasses.asdict(device) | {"peak": device.peak, "fits": device.fits} for device in plan.devices],
        "micro_batch": dataclasses.asdict(plan.rows)
        | {"rows": plan.rows.rows, "tokens": plan.rows.tokens, "per_update": plan.micro_batches},
        "step": dataclasses.asdict(plan.work) | {"bottleneck": plan.work.bottleneck},
        "trainers": plan.resources.trainers,
        "servers": plan.resources.servers,
        "assumed": assumptions(plan),
        "advice": list(advice),
    }


def facts(plan: Plan) -> list[tuple[str, str]]:
    size, resources, rows = plan.size, plan.resources, plan.rows
    trained = "" if size.trained == size.parameters else f", {size.trained:,} trained (LoRA)"
    active = f", {size.parameters - size.idle:,} for each token" if size.idle else ""
    servers = f", {counted(resources.servers, 'vLLM server')}" if resources.servers else ""
    split = f" on {resources.tensor_parallel} GPUs each" if resources.tensor_parallel > 1 else ""
    prompts, completions = counted(rows.prompts, "prompt"), counted(rows.rows, "completion")
    layout = f"{prompts} of {rows.prompt} + {completions} of {rows.completion}"
    processes = f"{counted(resources.trainers, 'process')}, {plan.run.hardware.parallel}"
    return [
        ("model", f"{size.parameters:,} parameters{active}{trained}, {size.layers} layers ({size.source})"),
        ("computes in", plan.dtype),
        ("training", f"{processes}{servers}{split}"),
        ("micro-batch", f"{rows.tokens:,} tokens: {layout}; {plan.micro_batches} per update and process"),
    ]


def _device(device: Device) -> list[Text | Table]:
    many = f" (each of {device.count})" if device.count > 1 else ""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for column, justify in (("", "left"), ("update", "right"), ("generation", "right"), ("", "left")):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for item in device.items:
        if round(item.update) or round(item.generation):
            table.add_row(item.name, _gib(item.update), _gib(item.generation), item.note)
    totals = [_gib(sum(getattr(item, name) for item in device.items)) for name in ("update", "generation")]
    share = f"{'fits' if device.fits else 'does not fit'}: {device.peak / device.memory:.0%} at the peak"
    table.add_section()
    table.add_row("total", *totals, share)
    return [_bold(f"\n{device.name}{many}, GiB of {device.memory / GIB:,.1f}"), table]


def _gib(value: float) -> str:
    if not value:
        return "-"
    return f"{value / GIB:,.2f}" if value >= GIB / 200 else f"{value / 2**20:,.1f} MiB"


def step_facts(plan: Plan) -> list[tuple[str, str]]:
    work = plan.work
    return [
        ("tokens", f"{work.completions:,} completions, {work.generated:,} tokens generated, {work.tokens:,} trained"),
        ("FLOPs", f"{work.forward:.3g} forward, {work.backward:.3g} backward, {work.generation:.3g} generation"),
        *((part, f"{seconds:,.3g} s") for part, seconds in work.seconds.items()),
        ("bottleneck", work.bottleneck),
    ]


def assumptions(plan: Plan) -> list[str]:
    costs, decoding = COSTS[plan.resources.kind], DECODE_COSTS[plan.resources.kind]
    products = f"products with weights take {costs.linear:.3g} times their time at the peak"
    others = f"attention {costs.attention:.3g} times; decoding reads memory in {decoding.reading:.3g} times its time"
    found = [*plan.resources.assumed, f"{products}, {others} (docs/plan.md)"]
    if plan.resources.gpu:
        kept = "" if plan.rows.flex else "; attention keeps the tensors that torch's sdpa keeps on a CPU"
        found.append(f"weights are sent at {LINK / 1e9:g} GB/s{kept}")
    if plan.compiled:
        found.append("decoder layers are compiled (model.compile), as on one H100: fewer launches and activations")
    if plan.run.algorithm.keep.max_rounds > 1:
        found.append("one round of sampling; algorithm.keep=dynamic may need more")
    if plan.resources.gpu and plan.resources.trainers > 1:
        found.append("the formulas for several GPUs have not been compared with a run on GPUs")
    return found


def verdict(plan: Plan) -> str:
    """Whether it fits, and how full the fullest device is, one that vLLM fills on purpose aside."""
    candidates = [device for device in plan.devices if not device.fits]
    candidates = candidates or [device for device in plan.devices if device.peak < device.memory] or plan.devices[:1]
    worst = max(candidates, key=lambda device: device.peak / device.memory)
    name = worst.name if worst.name.startswith(("this", "each")) else f"a {worst.name}"
    room = f"{worst.peak / GIB:,.1f} of {worst.memory / GIB:,.1f} GiB on {name}"
    if not plan.fits:
        return f"It does not fit: {room}."
    left = f"which leaves {(worst.memory - worst.peak) / GIB:,.1f} GiB ({1 - worst.peak / worst.memory:.0%})"
    tight = ". That is little: fragments of memory are not in the plan" if plan.is_tight else ""
    return f"It fits: at most {room}, {left}{tight}."


def _bold(text: str) -> Text:
    return Text(text, style="bold")


def _pairs(pairs: Sequence[tuple[str, str]]) -> list[Text]:
    width = max(len(name) for name, _ in pairs) + 2
    return [Text.assemble((f"  {name:<{width}}", "dim"), value) for name, value in pairs]


def _list(title: str, lines: Sequence[str]) -> list[Text]:
    return [_bold(f"\n{title}"), *(Text(f"  {line}") for line in lines)] if lines else []


def advice(plan: Plan, again: Again) -> Iterator[str]:
    """A line for each change that helps."""
    before = {device.name: device.peak - device.memory for device in plan.devices}
    for change in candidates(plan):
        try:
            after = again(change)
        except ConfigError:  # the change contradicts another key
            continue
        missing = {device.name: device.peak - device.memory for device in after.devices}
        if (after.fits and not plan.fits) or any(value < before.get(name, value) for name, value in missing.items()):
            yield f"{' '.join(change)}: {outcome(after)}"


def larger(plan: Plan, again: Again) -> Iterator[str]:
    """A line for larger micro-batches, which keep a GPU busier, if they fit."""
    tokens = plan.run.train.micro_batch_tokens
    for times in (4, 2):
        if plan.resources.gpu and plan.micro_batches > 1 and times * tokens <= LARGE_MICRO_BATCH:
            after = again(change := [f"train.micro_batch_tokens={times * tokens}"])
            if after.fits and not after.is_tight and after.micro_batches < plan.micro_batches:
                yield f"{' '.join(change)}: {outcome(after)}, in fewer launches"
                return


def outcome(plan: Plan) -> str:
    """`fits, 31.0 of 80.0 GiB (training GPU)`."""
    peaks = ", ".join(f"{d.peak / GIB:,.1f} of {d.memory / GIB:,.1f} GiB ({d.name})" for d in plan.devices)
    return f"{'fits' if plan.fits else 'does not fit yet'}, {peaks}"


def candidates(plan: Plan) -> Iterator[list[str]]:
    """Changes to try one at a time, then together those that do not change what the policy learns."""
    run, resources = plan.run, plan.resources
    shared_by = run.hardware.context_parallel
    length = -(-run.rollout.longest_row // shared_by)
    harmless = []
    if not run.train.gradient_checkpointing:
        harmless.append("train.gradient_checkpointing=true")
    if plan.rows.rows > 1:
        harmless.append(f"train.micro_batch_tokens={max(length, plan.rows.tokens // shared_by // 2)}")
    rows, group = getattr(run.engine, "max_rows", 0), run.rollout.group_size
    if rows > group:
        harmless.append(f"engine.max_rows={max(group, rows // 4)}")
    if resources.trainers > 1 and run.hardware.parallel == "ddp":
        harmless.append("hardware.parallel=fsdp2")
    yield from ([change] for change in harmless)
    least = [c if "micro_batch" not in c else f"train.micro_batch_tokens={length}" for c in harmless]
    if least != harmless[:1]:
        yield least
    if resources.servers and resources.gpu:
        yield [f"engine.tensor_parallel={2 * resources.tensor_parallel}"]
        if resources.shared:
            yield ["engine.gpu_memory_utilization=0.3"]
    if resources.gpu and not plan.run.model.lora.rank:
        yield ["model.lora.rank=16", *harmless]


def simulation_text(found: Sweep, title: str, plan: Plan) -> str:
    """A row for each number of servers, the configured one marked, and which is best."""
    return _text_of(
        _bold(f"grpocli plan {title}".rstrip()),
        *_pairs(_simulated_facts(found)),
        _bold(f"\nsimulated steps by {found.unit}, * as configured"),
        _simulated_table(found),
        _bold(f"\n{_recommendation(found)}"),
        *([] if plan.fits else [Text(verdict(plan))]),
    )


def _simulated_facts(found: Sweep) -> list[tuple[str, str]]:
    job, faults = found.row.simulated.job, found.row.simulated.job.faults
    kept = f", {job.kept:.0%} of the groups kept" if job.kept < 1 else ""
    pairs = [
        ("step", f"{job.prompts:,} prompts x {job.group} completions{kept}; max_staleness={job.max_staleness}"),
        ("lengths", found.lengths),
        ("speeds", found.speeds),
    ]
    if faults.per_hour or faults.save:
        every = f"every {counted(faults.every, 'step')}" if faults.every else "never"
        text = f"{faults.per_hour:g} per device and hour; a checkpoint {every}, {faults.save:g} s; {faults.restart:g} s"
        pairs.append(("failures", f"{text} to start again, {faults.server_restart:g} s for a server"))
    return pairs


def _simulated_table(found: Sweep) -> Table:
    faults = found.row.simulated.job.faults
    headers = ["devices", "memory", "step, s", "trainers idle", "servers idle", "tokens/s", "per device"]
    headers += ["lost", "run, h"] if faults.per_hour or faults.save else []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for header in (found.unit.removeprefix("rollout "), *headers):
        table.add_column(header, justify="right")
    for row in found.rows:
        one, mark = row.simulated, "*" if row.nodes == found.planned else ""
        cells = [
            f"{mark}{row.nodes:,}",
            f"{one.job.devices:,}",
            f"{row.memory:.0%}",
            f"{one.step_seconds:,.3g}" if one.step_seconds < 1000 else f"{one.step_seconds:,.0f}",
            f"{one.trainer_idle:.0%}",
            f"{one.rollout_idle:.0%}",
            f"{one.tokens_per_second:,.0f}",
            f"{row.per_device:,.1f}",
            f"{one.overhead:.1%}",
            f"{one.seconds / 3600:,.1f}",
        ]
        table.add_row(*cells[: len(headers) + 1])
    return table


def _recommendation(found: Sweep) -> str:
    best, unit = found.best, found.unit
    if best.memory > FULL:
        return "None of them fits."
    fitting = [row for row in found.rows if row.memory <= FULL]
    fastest = min(fitting, key=lambda row: (row.simulated.step_seconds, row.nodes))
    text = f"Most tokens per device: {counted(best.nodes, unit.removesuffix('s'))}."
    if fastest is not best:
        text += f" Shortest steps: {fastest.nodes:,}."
    if len(fitting) < len(found.rows):
        text += " Those above 100% of the memory do not fit."
    return text
