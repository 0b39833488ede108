"""Plans that can be looked at: a training step of one rank, traced without weights, ranks or a process group."""
