"""Say what is active here, and why the rest is not: the command merak-doctor, in a clone. --help says more."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_merak.cli.doctor import main

if __name__ == "__main__":
    sys.exit(main())
