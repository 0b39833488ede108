"""The distributed nodes of a captured graph, and what they lower to."""
