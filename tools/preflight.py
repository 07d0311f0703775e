"""Let every rank of a job meet every other before the job does: the command merak-preflight, in a
clone. See --help.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_merak.cli.preflight import main

if __name__ == "__main__":
    sys.exit(main())
