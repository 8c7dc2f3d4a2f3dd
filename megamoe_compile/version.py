"""The release: pyproject.toml reads it here, and what is stored names it."""

__version__ = "0.1.0"
