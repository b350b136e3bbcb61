"""The command line: parse, call, print. A command is a class, imported when it is used."""

import argparse
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from itertools import pairwise

from minidist import __version__
from minidist.cli.options import Parser
from minidist.errors import CommTimeout, RankFailed, WrongInput, is_wrong_input

COMMANDS = {  # what each does; `plan` is the class PlanCommand of plan.py
    "train": "train a small model on several ranks, then certify its gradients",
    "translate": "translate numbers in words with a model that train has saved",
    "verify": "compare every strategy's gradients and bytes with one device and with formulas",
    "strategies": "list the strategies: paper, file, lesson, promise",
    "timeline": "draw a pipeline's schedule, simulated or measured, with its bubble and its memory",
    "plan": "search the best plan for a model and a machine; profile, measure and predict this one",
    "mutants": "plant known mistakes in the package, and run the tests that must find them",
    "lab": "list labs, hand them out, test and grade them",
    "explore": "serve pages that answer back: write a schedule, see it judged, run it for real",
    "site": "make pages of the lessons, the API and the READMEs",
    "bench": "measure steps, communication, pipelines and GPUs against PyTorch, MPI and gloo",
}
MODULES = {  # of commands whose module has another name
    "translate": "train",
    "strategies": "verify",
    "mutants": "lab",
    "explore": "pages",
    "site": "pages",
}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while a command runs.

    KeyboardInterrupt itself may come while `exec` runs a text, as it does for each dataclass that
    is imported. Then `python -m` ends by SIGINT, though it is caught. A subclass has no such end.
    """


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status: 1 it failed, 2 wrong input, 130 Ctrl-C.

    Under MPI every process runs the command, and only the first one prints.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    _open_closed_streams()
    if "--transport=mpi" not in arguments and ("--transport", "mpi") not in pairwise(arguments):
        return _main(arguments)
    with open(os.devnull, "w") as nowhere, ExitStack() as silence:
        errors = io.StringIO()
        if other := _is_not_the_first():
            silence.enter_context(redirect_stdout(nowhere))
            silence.enter_context(redirect_stderr(errors))
        status = _main(arguments)
    if status and other is not None:
        from minidist.comm.mpi import library as mpi

        mpi.end_together(status, errors.getvalue())
    return status


def _is_not_the_first() -> bool | None:
    """Return whether this is a process of MPI's, and not the first one; None without MPI."""
    from minidist.comm.mpi import library as mpi  # needs NumPy, which not every command does

    try:
        return not mpi.is_first()
    except ValueError:  # there is no MPI, and the command will say so
        return None


def _main(arguments: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # ASCII may lack a sampled character
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 2
    first = parser.parse_args(arguments)
    if first.command is None:
        parser.error("COMMAND is missing; `minidist --help` lists the commands")
    try:
        with _interruptible():
            parsed = parser_of(first.command).parse_args(first.arguments, first)
            status = _checked(parsed.command_type.made_of(parsed)).run()
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("\nminidist: interrupted; all that it began has stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if (known := _known(error)) is None:
            raise
        if first.debug:
            sys.excepthook(*sys.exc_info())
        status, message = known
        if message is not None:
            print(f"minidist: {message}", file=sys.stderr)
        return status


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise Interrupted at Ctrl-C, also where C code makes another error of it; then ignore it.

    The handler of a caller stays, and so does Ctrl-C that is ignored: `nohup minidist train &`.
    """
    came: list[bool] = []

    def interrupt(*_) -> None:
        came.append(True)
        raise Interrupted

    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except BaseException as error:  # an import that is interrupted may be an ImportError
        if came and not isinstance(error, KeyboardInterrupt):
            raise Interrupted from error
        raise
    finally:  # a second Ctrl-C shall not end what cleans up
        signal.signal(signal.SIGINT, signal.SIG_IGN if came else signal.default_int_handler)


def _known(error: Exception) -> tuple[int, object] | None:
    """Return exit status and line for an error that is not our bug; None for all others."""
    match error:
        case OSError(errno=errno.EPIPE | errno.ENOSPC):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is unflushed
            if error.errno == errno.EPIPE:  # the reader has gone: `minidist verify | head`
                return 1, None
            return 1, f"cannot write the output: {error.strerror}"
        case CommTimeout():
            return 1, error
        case MemoryError() | RankFailed(__cause__=MemoryError()):
            cause = error.__cause__ if isinstance(error, RankFailed) else error
            return 1, f"not enough memory: {cause}; use smaller sizes"
        case _ if is_wrong_input(error):
            return 2, error.__cause__ if isinstance(error, RankFailed) else error
    return None


def _parser() -> Parser:
    """Return the parser of what comes before a command's own arguments."""
    lines = [f"  {name:<10} {description}" for name, description in COMMANDS.items()]
    parser = Parser(
        prog="minidist",
        usage="minidist [-h] [--version] [--debug] COMMAND ...",
        description="Distributed deep learning from scratch, proved equal to one device.",
        epilog="\n".join(["commands:", *lines, "", "`minidist COMMAND --help` describes one."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"minidist {__version__}")
    _add_debug(parser)
    parser.add_argument(
        "command", metavar="COMMAND", nargs="?", choices=COMMANDS, help="one of those below"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def parser_of(name: str) -> Parser:
    """Return the parser of a command's own arguments."""
    module = import_module(f"{__name__}.{MODULES.get(name, name)}")
    command = getattr(module, f"{name.capitalize()}Command")
    parser = Parser(prog=f"minidist {name}", examples=command.EXAMPLES)
    command.add_to(parser)
    _add_debug(parser)
    return parser


def _checked(command):
    """Return the command, with its transport; refuse several copies of it that do not cooperate."""
    starts = getattr(command, "profile", True)  # `plan` starts ranks with --profile alone
    if starts and getattr(command, "transport", "") is None:
        from minidist.comm.mpi.library import copies  # needs NumPy, as such a command does

        if remedy := copies("--transport {}"):
            raise WrongInput(remedy)  # in each: the first that ends may end all others
        command.transport = "process"
    return command


def _add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback of an error, also of wrong input"
    )


def _open_closed_streams() -> None:
    """Replace each standard stream that the caller has closed (`minidist verify >&-`) by /dev/null.

    Otherwise the next file or socket gets its number, and then also what is printed.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            os.set_inheritable(opened, opened == number)
            setattr(sys, name, open(opened, mode, closefd=False))
