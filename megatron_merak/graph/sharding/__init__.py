"""Which weights and values of a captured graph are sharded over tensor-parallel ranks, by one rule
per operator.
"""
