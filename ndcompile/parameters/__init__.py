"""Parameters as they are stored: DTensors over padded buffers, and the values that fill them."""
