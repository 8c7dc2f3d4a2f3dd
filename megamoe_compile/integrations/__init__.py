"""The old names of `megamoe_compile.engines.transformers`, kept for one release."""

import warnings


def moved(old: str, new: str) -> None:
    """Warn the importer of an old module, two frames above."""
    warnings.warn(
        f"megamoe_compile.integrations.{old} is now megamoe_compile.engines.{new}",
        DeprecationWarning,
        stacklevel=3,
    )
