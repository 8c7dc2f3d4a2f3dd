"""The `megamoe` command. Each command is a module with `add_arguments(parser)` and `run(args)`.

`run` returns the exit code, and raises argparse.ArgumentError for arguments that make no sense.

Only the module of the command that was asked for is imported: `megamoe doctor` must work where
what another command needs is missing, since saying so is its job.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from ..errors import MegaMoEError
from ..version import __version__

COMMANDS = {
    "doctor": "say what can run here, or why not and what to change",
    "plan": "memory per rank for a model, a number of ranks and a capacity",
    "decode": "decode a Mixture-of-Experts model through compiled, captured steps",
    "bench": "decode a whole model with and without MegaMoE, and compare the times",
}
EXTRAS = {"transformers": "hf"}  # modules that a command may lack, and the extra that brings them


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 fine, 1 the command's own no, 2 bad arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="megamoe", description="MegaMoE for torch.compile and CUDA graphs."
    )
    parser.add_argument("--version", action="version", version=f"megamoe-compile {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    command = next((argument for argument in arguments if argument in COMMANDS), None)
    commands = {
        name: subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        for name, text in COMMANDS.items()
    }
    if command is None:
        parser.parse_args(arguments)  # --help, --version or an error: it does not return
        raise AssertionError("unreachable")
    try:
        module = importlib.import_module(f".{command}", __package__)
        module.add_arguments(commands[command])
        args = parser.parse_args(arguments)
        return int(module.run(args))
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(
            f"megamoe {command}: expected the module {error.name}, got none. "
            f"Run: pip install 'megamoe-compile[{extra}]'",
            file=sys.stderr,
        )
        return 1
    except MegaMoEError as error:
        print(f"megamoe {command}: {error}", file=sys.stderr)
        return 1
    except argparse.ArgumentError as error:
        commands[command].error(str(error))  # exits with 2
