"""Convert a launch script of Megatron-LM: the command merak-from-megatron, in a clone. See
--help.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_merak.cli.from_megatron import main

if __name__ == "__main__":
    sys.exit(main())
