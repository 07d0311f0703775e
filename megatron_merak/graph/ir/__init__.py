"""Facts about the nodes of a graph, the same for every pass."""
