"""The entry point of the command ``normcontrol`` and of ``python -m normcontrol.lab``."""

import os
import sys

from normcontrol.lab.cli import main as command


def main() -> int:
    status = command.main()
    if "RANK" in os.environ:  # one of the processes that torchrun started
        from normcontrol.lab.training.parallel import exit_now

        exit_now(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
