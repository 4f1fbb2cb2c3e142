"""What the libraries print by themselves: progress bars and advice."""

from __future__ import annotations

import logging
import os
import sys


def quiet_libraries() -> None:
    """Switch off the libraries' progress bars and advice, which would tear the live view. Warnings go to the log."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # its errors are exceptions, which grpocli reports
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if "transformers" in sys.modules:  # imported before, by a program that calls grpocli: the variables come too late
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    if "datasets" in sys.modules:
        from datasets import disable_progress_bars
        from datasets.utils.logging import CRITICAL, set_verbosity

        disable_progress_bars()
        set_verbosity(CRITICAL)
    if "huggingface_hub" in sys.modules:
        from huggingface_hub.utils.logging import set_verbosity_error
        from huggingface_hub.utils.tqdm import disable_progress_bars as disable_hub_bars

        disable_hub_bars()
        set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.captureWarnings(True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
