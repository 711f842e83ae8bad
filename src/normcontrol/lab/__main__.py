import sys

from normcontrol.lab import study_command

if sys.argv[1:] and sys.argv[1] in study_command.COMMANDS:  # these need fewer packages than the rest
    sys.exit(study_command.main(sys.argv[1:]))

from normcontrol.lab.cli import main

sys.exit(main())
