"""Start the ranks of a script or a job, which may have parameter servers: the command merak-launch.
See --help.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_merak.cli.launch import main

if __name__ == "__main__":
    sys.exit(main())
