"""Makes the pictures of README.md from a real run: the terminal's live view and the report.

    make pictures

It trains the default run, lets the live view draw one of its steps again, writes the report, and photographs both with
headless Chromium.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image, ImageOps
from rich.console import Console

from grpocli.runs.metrics import read_metrics
from grpocli.runs.rollouts import read_rollouts
from grpocli.runs.run_dir import RunDir
from grpocli.views.live_view import LiveView
from grpocli.views.view import ShownCompletion

HERE = Path(__file__).parent
STEP = 42
"""The step of the pictures: most is learned, and groups still differ."""
COLORS = 128
"""Of a picture: few keep it small, and the anti-aliasing of text needs no more."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        run = work / "runs" / "default"
        grpocli("train", f"hydra.run.dir={run}", "checkpoint.every=0")
        page = work / "report.html"
        grpocli("report", str(run), "--out", str(page))
        (work / "live.svg").write_text(live_view(run))
        photograph(work / "live.svg", HERE / "live_view.png", 1180, 640)
        photograph(page, HERE / "report.png", 1280, 1250, step=str(STEP))
        place = {"tab": "rollouts", "from": str(STEP), "to": str(STEP), "color": "logp"}
        photograph(page, HERE / "rollouts.png", 1280, 1000, **place)


def grpocli(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "grpocli", *words], check=True, stdout=subprocess.DEVNULL)


def live_view(run: Path) -> str:
    """The live view after a step of the run, as SVG."""
    console = Console(record=True, width=118, height=30, file=io.StringIO(), force_terminal=False)
    view = LiveView(console)
    view.start("default", [], 60)
    for row in read_metrics(RunDir(run).metrics)[:STEP]:
        view.step(row["step"], {name: value for name, value in row.items() if name != "step"})
    best = max((row for row in read_rollouts(RunDir(run).rollouts(STEP)) if row["group"] == 0), key=advantage)
    rewards = {name.removeprefix("reward/"): value for name, value in best.items() if name.startswith("reward/")}
    view.sample(ShownCompletion(best["prompt"], best["completion"], rewards, advantage(best), best["answer"]))
    view.stage("training")
    console.export_text(clear=True)
    console.print(view)
    return console.export_svg(title="grpocli train")


def advantage(row: dict[str, float | None]) -> float:
    return row["advantage"] or 0.0


def photograph(page: Path, picture: Path, width: int, height: int, **place: str) -> None:
    """A screenshot of a page, in a palette of few colors. place: the state in the page's address."""
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000"]
        size = [f"--window-size={width},{height}", f"--screenshot={shot}"]
        address = page.as_uri() + (f"#{urlencode(place)}" if place else "")
        subprocess.run(["chromium", *options, *size, address], check=True, capture_output=True, timeout=120)
        image = Image.open(shot).convert("RGB")
        if page.suffix == ".svg":  # centered in the window: without the white above and below
            image = image.crop(ImageOps.invert(image).getbbox())
        # rare colors stay, such as those of a curve
        image.quantize(COLORS, Image.Quantize.MAXCOVERAGE).save(picture, optimize=True)


if __name__ == "__main__":
    main()
