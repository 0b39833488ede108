"""From a graph with distributed nodes to a compiled one: AOTAutograd, partition, schedule, inductor."""
