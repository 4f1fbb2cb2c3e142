"""What travels to a machine with a GPU and no network, in .carry/: `make gpu-carry [ARGS=--no-vllm]` makes it.

Archives for a folder of sys.path: what grpocli needs there beside torch, transformers, accelerate, peft and what comes
with them, TRL, and vLLM for one dense model on one architecture with what its server imports. `gpu_proof.py` unpacks
them; nothing is installed there. The clone and the folder together are refused above 64 MiB.
"""

from __future__ import annotations

import argparse
import compileall
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import distributions, files
from pathlib import Path

from forks import child
from machine import CARRY, COMMIT, ROOT, commit
from prune_fatbin import pruned

LIMIT = 64  # MiB
PYTHON, PLATFORM, ARCHITECTURE = "3.12", "x86_64-manylinux_2_35", 90
BASE = (
    *("trl", "liger-kernel", "hydra-core", "omegaconf", "antlr4-python3-runtime", "datasets", "dill", "xxhash"),
    *("multiprocess", "math-verify", "latex2sympy2-extended", "starlette", "uvicorn"),
)
VLLM = (
    *("vllm==0.32.0", "pydantic", "pydantic-core", "pydantic-settings", "pydantic-extra-types", "annotated-types"),
    *("typing-inspection", "fastapi", "python-multipart", "python-dotenv", "email-validator", "dnspython", "openai"),
    *("jiter", "distro", "sniffio", "httpx2", "httpcore2", "truststore", "orjson", "msgspec", "pyzmq", "cbor2"),
    *("pybase64", "cachetools", "watchfiles", "setproctitle", "httptools", "jmespath", "loguru", "blake3", "ijson"),
    *("xgrammar", "apache-tvm-ffi", "llguidance", "oss-harmony", "openai-harmony", "partial-json-parser", "depyf"),
    *("compressed-tensors", "astor", "model-hosting-container-standards", "prometheus-fastapi-instrumentator"),
    *("python-json-logger", "importlib-metadata", "googleapis-common-protos", "opentelemetry-api"),
    *("opentelemetry-sdk", "opentelemetry-proto", "opentelemetry-exporter-otlp", "opentelemetry-semantic-conventions"),
    *("opentelemetry-exporter-otlp-common", "opentelemetry-exporter-otlp-proto-common"),
    *("opentelemetry-exporter-otlp-proto-grpc", "opentelemetry-exporter-otlp-proto-http"),
    *("opentelemetry-exporter-http-transport", "opentelemetry-semantic-conventions-ai"),
)
"""What vLLM's server, engine and sampler import, read from `-X importtime` of a server with one dense model."""
LEFT_OUT = re.compile(
    r"(^|/)(__pycache__|tests?|static)/|\.(pyc|pyi|a|h|hpp|cuh|pxd|pyx|cpp|md|rst)$|^bin/|^\.lock"
    r"|\.dist-info/(RECORD|licenses|LICENSE|direct_url|uv_)|^tvm_ffi/(include|share)|vllm-rs$|^vllm/benchmarks/"
    r"|(_vllm_fa2_C|_moe_C|_flashkda_C|_deepselect_C|_flashmla_C|_flashmla_extension_C|_qutlass_C).*\.so$"
    r"|^vllm/third_party/(deep_gemm|fmha_sm100|tml_fa4)/|^vllm/vllm_flash_attn/cute/|^vllm/kernels/helion/configs"
)
"""Files that are not packed: FlashAttention 2, experts, MLA and DeepGEMM of vLLM among them."""
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # flashinfer is not carried
    "VLLM_NO_USAGE_STATS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asks whether there is a GPU without touching it, after which no fork could
}
CACHES = {"GRPOCLI_CACHE": "cache", "VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton"}
"""Variables of processes; those that are set already stay. Caches are folders below that of work."""


def fetch(names: Sequence[str], target: Path) -> None:
    """Unpack the wheels of packages into a folder, in the versions of requirements/."""
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    for name in ("parity", "constraints"):
        uv += ["--constraint", str(ROOT / "requirements" / f"{name}.txt")]
    if subprocess.run([*uv, "--python-version", PYTHON, "--python-platform", PLATFORM, *names]).returncode:
        raise SystemExit(f"packages could not be fetched, see above: {CARRY} is as it was")


def add_metadata(target: Path) -> None:
    """grpocli's version, its dependencies, and the entry point by which vLLM finds its plugin."""
    own = {file.name: Path(str(file.locate())) for file in files("grpocli") or ()}
    folder = target / own["METADATA"].parent.name
    folder.mkdir(parents=True)
    for name in ("METADATA", "WHEEL", "entry_points.txt"):
        shutil.copy(own[name], folder)


def prune(library: Path) -> None:
    """Keep the code of one architecture; a new file takes the library's place, which may be a link into a cache."""
    new = library.with_suffix(".new")
    new.write_bytes(pruned(library.read_bytes(), ARCHITECTURE))
    subprocess.run(["strip", "--strip-unneeded", str(new)], check=True)
    new.replace(library)


def pack(archive: Path, folder: Path, files: Sequence[Path]) -> str:
    """Pack files of a folder; return the archive's name and size."""
    with lzma.open(archive, "wb", preset=6) as out, tarfile.open(fileobj=out, mode="w") as packed:
        for path in files:
            packed.add(path, str(path.relative_to(folder)), recursive=False)
    return f"{archive.name}: {mib(archive.stat().st_size)}"


def packable(folder: Path) -> list[Path]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in found if not LEFT_OUT.search(str(path.relative_to(folder)))]


def mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def checked_size(tree: int, carried: int) -> str:
    """A line about the sizes in bytes. Raises SystemExit above LIMIT."""
    said = f"the clone has {mib(tree)}, .carry {mib(carried)}: {mib(tree + carried)} of {LIMIT} MiB"
    if tree + carried > LIMIT * 2**20:
        raise SystemExit(f"{said}, too much to carry: --no-vllm leaves vLLM out")
    return said


def build(with_vllm: bool) -> None:
    """Make the folder, which takes the place of an earlier one when it is whole and small enough."""
    if with_vllm and not shutil.which("strip"):
        raise SystemExit("strip, which makes vLLM's libraries small enough to carry, is missing: install binutils")
    pool = ThreadPoolExecutor(2)  # not waited for after Ctrl-C
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".carry-", ignore_cleanup_errors=True) as scratch:
        base, served, new = (Path(scratch) / name for name in ("base", "served", "new"))
        new.mkdir()
        fetch(BASE, base)
        add_metadata(base)
        jobs = [(new / "base.tar.xz", base, packable(base))]
        if with_vllm:
            fetch(VLLM, served)
            found = packable(served)
            libraries = [path for path in found if path.suffix == ".so" and path.stat().st_size > 10**6]
            list(pool.map(prune, [path for path in libraries if path.is_relative_to(served / "vllm")]))
            libraries.sort(key=lambda path: -path.stat().st_size)
            others = [path for path in found if path not in libraries]
            parts = {"kernels": libraries[::2], "libraries": libraries[1::2], "vllm": others}
            jobs = [*((new / f"{name}.tar.xz", served, part) for name, part in parts.items()), *jobs]
        print(*pool.map(lambda job: pack(*job), jobs), sep="\n", flush=True)
        (new / COMMIT).write_text(commit())
        said = checked_size(size_of_clone(), sum(path.stat().st_size for path in new.iterdir()))
        if CARRY.exists():
            CARRY.rename(Path(scratch) / "earlier")
        new.rename(CARRY)
    print(said)


def size_of_clone() -> int:
    """The bytes of the files that git tracks or does not ignore."""
    listed = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
    names = subprocess.run(listed, capture_output=True, check=True, cwd=ROOT, text=True).stdout.split("\0")
    return sum(path.stat().st_size for path in map(ROOT.joinpath, names) if path.is_file())


def unpack_archive(archive: Path, site: Path, mark: Path) -> None:
    """Into a folder of sys.path, and touch `mark`. vLLM's modules are compiled, since several processes import them.

    Raises SystemExit if the archive is damaged, or the disk full.
    """
    try:
        with lzma.open(archive) as packed, tarfile.open(fileobj=packed, mode="r|") as members:
            members.extractall(site, filter="tar")
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise SystemExit(f"{archive} cannot be unpacked into {site}: {error}") from error
    if archive.name.startswith("vllm"):
        compileall.compile_dir(site, quiet=2, workers=8)
    mark.touch()


def prepare(work: Path) -> list[int]:
    """Make grpocli importable here, by unpacking .carry if this Python lacks it. Returns processes that still unpack.

    Raises SystemExit if there is nothing to unpack.
    """
    installed = any(distributions(name="grpocli"))  # the clone, which is on the path in any case, is none
    archives, site = [] if installed else sorted(CARRY.glob("*.tar.xz")), work / "site"
    if not archives and not installed:
        raise SystemExit(f"{sys.executable} has no grpocli, and {CARRY} no packages: see docs/evidence/gpu.md")
    if work.stat().st_uid != os.getuid():  # its packages are imported
        raise SystemExit(f"--work {work} belongs to somebody else: choose another")
    paths = [str(path) for path in (ROOT, ROOT / "bench" / "gpu_proof", ROOT / "bench" / "side_by_side", site)]
    sys.path[:0] = paths
    given = VARIABLES | {name: str(work / folder) for name, folder in CACHES.items()}
    os.environ.update(given | dict(os.environ))
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    unpacking = []
    for archive in archives:  # base.tar.xz comes first
        mark = work / f"{archive.name}-{archive.stat().st_size}"
        if not mark.exists():
            unpack = partial(unpack_archive, archive, site, mark)
            if archive.name.startswith("base"):
                unpack()
            else:
                unpacking.append(child(unpack, 1, 2))
    return unpacking


def main() -> None:
    about = "Put what gpu-proof needs without a network into .carry/."
    parser = argparse.ArgumentParser(prog="make gpu-carry", description=about)
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM out")
    arguments = parser.parse_args()
    try:
        build(not arguments.no_vllm)
    except KeyboardInterrupt:
        print(f"stopped: {CARRY} is as it was", file=sys.stderr, flush=True)
        os._exit(1)  # threads that still pack would be waited for


if __name__ == "__main__":
    main()
