"""The ops: a leaf of the project. It takes tensors and scalars and knows no config."""
