"""Simulate pipeline schedules and plans: the command merak-simulate, in a clone. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_merak.cli.simulate import main

if __name__ == "__main__":
    main()
