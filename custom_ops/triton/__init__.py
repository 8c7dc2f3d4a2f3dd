"""Backend `triton`: portable kernels, for any GPU from SM80."""
