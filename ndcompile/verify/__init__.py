"""Facts that hold after every pass, and on all ranks before the first run."""
