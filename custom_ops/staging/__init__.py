"""What stands before the experts: routing, and rows quantized and masked for them."""
