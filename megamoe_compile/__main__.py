"""`python -m megamoe_compile`, the same as `megamoe`."""

from .commands.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
