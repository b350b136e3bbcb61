"""mpiexec across several hosts, by hand; see the package."""

import argparse
import shutil
import sys

from tests.several_hosts import Hosts, why_not

parser = argparse.ArgumentParser(prog="python -m tests.several_hosts", description=__doc__)
parser.add_argument("--hosts", type=int, default=2, help="how many (2)")
parser.add_argument("--mbit", type=float, default=1000, help="the rate of a link (1000)")
parser.add_argument("-n", type=int, default=2, metavar="RANKS", help="ranks in all (2)")
parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="what every rank runs")
args = parser.parse_args()
if reason := why_not():
    parser.error(reason)
program = shutil.which(args.command[0])  # the same path on every host
if program is None:
    parser.error(f"no command {args.command[0]}")
try:
    with Hosts(args.hosts, args.mbit) as hosts:
        before = hosts.bytes_between()
        done = hosts.mpiexec(args.n, [program, *args.command[1:]])
        print(f"bytes between hosts: {hosts.bytes_between() - before:,}", file=sys.stderr)
except KeyboardInterrupt:
    sys.exit(130)
sys.exit(done.returncode)
