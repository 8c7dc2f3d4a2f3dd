"""The experts as separate kernels around DeepGEMM's GEMMs, to measure against."""
