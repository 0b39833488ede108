"""What passes share: edits of graphs, and what is found in them."""
