"""Importing this exempts what exists from garbage collection: objects of modules live as long as the
process, and its forks.
"""

import gc

gc.collect()
gc.freeze()
