"""`megamoe decode`: a model through compile and GraphRunner, against the eager run."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
