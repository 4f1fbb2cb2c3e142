"""accelerate's launcher as a quiet child: `python -m grpocli.launch.accelerated ARGUMENTS OF accelerate launch`.

Only `grpocli train`, which has started it, decides when the trainer processes end. So signals that a whole job gets
(SLURM sends them to every process) pass it by, and `failures.py` has the word on a process that failed.
"""

from __future__ import annotations

import logging
import os
import signal
import sys


def main() -> None:
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    arguments = launch_command_parser().parse_args()
    arguments.log_dir = os.devnull  # else torch leaves an empty log folder in the temporary directory
    arguments.signals_to_handle = "SIGQUIT"  # torch's launcher would stop at the others; accelerate has no flag for it
    try:
        launch_command(arguments)
    except ChildFailedError:
        sys.exit(1)


if __name__ == "__main__":
    main()
