"""`minidist explore`: pages that answer back. `minidist site`: lessons, API, READMEs as pages."""

import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from minidist.cli.options import Command, argument, option, whole
from minidist.errors import WrongInput

PORT = whole(65535, "a port has 16 bits", least=0)
BUILD = Path(__file__).parents[2] / "lessons" / "site" / "build.py"


@dataclass
class ExploreCommand(Command):
    """Serve pages to a browser on this machine: write a schedule, see it judged, run it on real
    ranks. Open the address that is printed. Ctrl-C ends it, and all that it has started."""

    EXAMPLES = (
        "minidist explore",
        "minidist explore --port 8000",
        "ssh -L 8000:127.0.0.1:8000 elsewhere minidist explore --port 8000",
    )
    port: int = option("of 127.0.0.1; 0: any that is free", PORT, default=0)

    def run(self) -> int:
        """Print the address; serve the pages until Ctrl-C, or a signal that asks to end."""
        from minidist.observe.pages.server import Server  # the help does without it

        ends = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        ends = [number for number in ends if signal.getsignal(number) != signal.SIG_IGN]  # nohup
        for number in ends:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        with Server(self.port) as server:
            for number in ends:  # an exception could be lost in what it interrupts
                signal.signal(number, lambda number, _: server.signals.append(number))
            print(server.address, flush=True)
            server.serve_forever(poll_interval=0.1)
        return 0


@dataclass
class SiteCommand(Command):
    """Run every lesson and make a site of them, in a checkout of the project."""

    EXAMPLES = (
        "minidist site /tmp/site",
        "minidist site /tmp/site --cache /tmp/executed",
        "minidist site public --cache executed",
    )
    folder: str = argument("where the pages go", "FOLDER")
    cache: str | None = option(
        "executed lessons (default: .cache/minidist-site at home)", metavar="FOLDER"
    )

    def run(self) -> int:
        """Build the site with Sphinx. ValueError where lessons or Sphinx are missing."""
        if not BUILD.exists():
            raise WrongInput(
                f"there are no lessons beside {Path(__file__).parents[1]}; clone the project"
            )
        if find_spec("myst_nb") is None:
            raise WrongInput("the site needs Sphinx and MyST-NB: pip install 'minidist[site]'")
        cache = ["--cache", self.cache] if self.cache else []
        return subprocess.call([sys.executable, BUILD, self.folder, *cache])
