"""Importing this imports pyarrow, which HuggingFace's trainer imports, without the thread that its
allocator of memory would start: processes are forked from the one that imports this.
"""

import os

NAME = "JE_ARROW_MALLOC_CONF"

given = os.environ.get(NAME)
os.environ[NAME] = "background_thread:false"
try:
    import pyarrow  # noqa: F401
except ImportError:  # neither the trainer nor a test imports it then
    pass
if given is None:
    del os.environ[NAME]
else:
    os.environ[NAME] = given
