"""Backend `reference`: the number recipe in PyTorch, the oracle of all others."""
