"""The command line: parse, call, print. One module per command, imported when the command is used.

A command's module has `add_arguments(parser)`: it describes the command, adds its arguments, and
sets `run`, a function that takes the parsed arguments and returns the exit status.
"""

import argparse
import errno
import os
import sys
from importlib import import_module

from minidist import __version__
from minidist.errors import CommTimeout, RankFailed

COMMANDS = {  # a module of this package, and what its command does
    "train": "train a character Transformer on several ranks, then certify its gradients",
    "verify": "compare every strategy's gradients and bytes with one device and with formulas",
    "timeline": "draw a pipeline's schedule, simulated or measured, with its bubble and its memory",
    "mutants": "run the property tests against wrong implementations of the strategies",
    "lab": "list labs, hand them out, test and grade them",
    "bench": "measure steps, communication and pipelines against PyTorch, MPI and gloo",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status: 1 it failed, 2 wrong input, 130 Ctrl-C."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # ASCII may lack a sampled character
    arguments, parser = sys.argv[1:] if arguments is None else arguments, _parser()
    if not arguments:
        parser.print_help()
        return 2
    given = parser.parse_args(arguments)
    try:
        status = _run(given.command, given.arguments)
        sys.stdout.flush()
        return status
    except ValueError as error:
        print(f"minidist: {error}", file=sys.stderr)
        return 2
    except RankFailed as error:
        if not isinstance(error.__cause__, ValueError):
            raise
        print(f"minidist: {error.__cause__}", file=sys.stderr)
        return 2
    except CommTimeout as error:
        print(f"minidist: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nminidist: interrupted; all ranks have stopped", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left to flush
        if error.errno == errno.ENOSPC:  # else the reader has gone: `minidist verify | head`
            print(f"minidist: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    """Return the parser of what comes before a command's own arguments."""
    lines = [f"  {name:<10} {words}" for name, words in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="minidist",
        usage="minidist [-h] [--version] COMMAND ...",
        description="Distributed deep learning from scratch, proved equal to one device.",
        epilog="\n".join(["commands:", *lines, "", "`minidist COMMAND --help` describes one."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"minidist {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _run(command: str, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"minidist {command}")
    import_module(f"{__name__}.{command}").add_arguments(parser)
    given = parser.parse_args(arguments)
    return given.run(given)


def _open_closed_streams() -> None:
    """Replace each standard stream that the caller has closed (`minidist verify >&-`) by /dev/null.

    Otherwise the next file or socket gets its number, and then also what is printed.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            os.set_inheritable(opened, opened == number)
            setattr(sys, name, open(opened, mode, closefd=False))
