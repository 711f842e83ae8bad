"""The way in: the command ``normcontrol``, and ``python -m normcontrol.lab``. Without the extra it
says what it needs."""

import os
import sys


def main() -> int:
    try:
        from normcontrol.lab.cli import study as study_command

        if (
            sys.argv[1:] and sys.argv[1] in study_command.COMMANDS
        ):  # these need fewer packages than the rest
            return study_command.main(sys.argv[1:])
        from normcontrol.lab.cli.main import main as run
        from normcontrol.lab.training.parallel import exit_now
    except ModuleNotFoundError as missing:
        if str(missing.name).startswith("normcontrol"):
            raise
        sys.exit(
            f"The laboratory needs {missing.name}, which is not installed: pip install "
            "'normcontrol[lab]'."
        )
    status = run()
    if "RANK" in os.environ:  # one of several processes
        exit_now(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
