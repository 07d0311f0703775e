"""The commands that an installation brings; the scripts in the root of a clone and in tools/ start the same ones."""
