"""Measure what this machine reaches, for plans: the command merak-probe, in a clone. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_merak.cli.probe import main

if __name__ == "__main__":
    sys.exit(main())
