"""Backend `deep_gemm`: the mega kernel of the sgl-deep-gemm wheels."""
