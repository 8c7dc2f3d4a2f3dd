"""Two kernels behind one op: which one a call takes, and the times that decide it."""
