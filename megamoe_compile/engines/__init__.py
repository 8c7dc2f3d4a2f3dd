"""What calls the layer: one package per engine, over one seam."""
