"""Show what fills the memory of a plan's ranks: the command merak-memory, in a clone. See
--help.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_merak.cli.report_memory import main

if __name__ == "__main__":
    main()
