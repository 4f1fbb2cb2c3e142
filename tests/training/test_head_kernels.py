"""The kernels of a GPU's output head by Triton's interpreter, which a process chooses when it imports triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version


@pytest.mark.survival
def test_kernels_equal_float64() -> None:
    triton = pytest.importorskip("triton", reason="it comes with torch for CUDA and with vLLM; neither is installed")
    if Version(triton.__version__) < Version("3.7"):
        pytest.skip(f"the interpreter of Triton {triton.__version__} does not run with today's NumPy")
    file = Path(__file__).with_name("interpreted_head.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
