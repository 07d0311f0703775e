"""Show what is in a checkpoint, or what differs between two: the command merak-inspect, in a clone.
See --help.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_merak.cli.inspect_checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
