"""How a model is placed: frozen data, read from transformers' plans, the user's rules and a config."""
