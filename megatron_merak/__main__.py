"""``python -m megatron_merak``: lists the commands, or starts one."""

import sys

from .cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
