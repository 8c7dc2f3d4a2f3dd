"""Peer-mapped memory, and the exchange of rows over it."""
