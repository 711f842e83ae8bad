import sys

from normcontrol.lab.cli import main

sys.exit(main())
