"""`minidist explore`: pages that answer back, on this machine, with real ranks behind them."""

import argparse
import signal
import sys

from minidist.cli.arguments import add_option, whole

EXAMPLES = (
    "minidist explore",
    "minidist explore --port 8000",
    "ssh -L 8000:127.0.0.1:8000 elsewhere minidist explore --port 8000",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = (
        "Serve pages to a browser on this machine: write a schedule, see it judged, run it on real "
        "ranks. Open the address that is printed. Ctrl-C ends it, and all that it has started."
    )
    port = whole(65535, "a port has 16 bits", least=0)
    add_option(parser, "--port", "of 127.0.0.1; 0: any that is free", port, "PORT", default=0)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print the address; serve the pages until Ctrl-C, or a signal that asks to end."""
    from minidist.pages.server import Server  # the help does without it

    ends = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    ends = [number for number in ends if signal.getsignal(number) != signal.SIG_IGN]  # by nohup
    for number in ends:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with Server(given.port) as server:
        for number in ends:  # an exception could be lost in what is interrupted, or stop a clean-up
            signal.signal(number, lambda number, _: server.signals.append(number))
        print(server.address, flush=True)
        server.serve_forever(poll_interval=0.1)
    return 0
