"""The small-batch kernel of one rank on SM90, the second path beside `deep_gemm`."""
