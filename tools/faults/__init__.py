"""What tools/inject_faults.py does: orders for one process of a command, and what became of the
command.
"""
