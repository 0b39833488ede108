"""The object in a compiled model's `forward`: it finds the graph of a call, feeds it, and keeps its caches."""
