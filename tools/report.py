"""Show a training run as one HTML page: the command merak-report, in a clone. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_merak.cli.report import main

if __name__ == "__main__":
    main()
