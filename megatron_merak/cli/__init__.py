"""The commands of an installation; the scripts in the root of a clone and in tools/ start the same
ones.
"""
