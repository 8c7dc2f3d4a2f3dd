"""`megamoe bench`: a whole model with four kinds of experts, their times or outputs."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
