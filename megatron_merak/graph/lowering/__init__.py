"""The captured graph as one rank computes it: local shapes, collectives at borders, segments of code."""
