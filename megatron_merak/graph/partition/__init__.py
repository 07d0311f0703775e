"""A captured graph as a chain of units."""
