"""Tokenize text into data sets: the command merak-preprocess, in a clone. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_merak.cli.preprocess_data import main

if __name__ == "__main__":
    sys.exit(main())
