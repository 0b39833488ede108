"""From a model and a call to one FX graph in the shapes that a rank computes with."""
