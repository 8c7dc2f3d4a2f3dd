"""CUDA, whatever the backend: builds, launches, streams, timing, and what a replay needs."""
