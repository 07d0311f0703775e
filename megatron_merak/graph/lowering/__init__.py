"""Lowers the captured graph to what one rank runs: local shapes, and segments of code between
collectives.
"""
