"""`minidist translate`: translate numbers in words with a model that `minidist train` has saved."""

import argparse
import sys

from minidist.cli.arguments import DEFAULT, whole
from minidist.translating import load, translate

BEAM = whole(1000, "all beginnings are decoded together, in a second or so")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = (
        "Translate numbers in words, English to Chinese or back, with the newest checkpoint of "
        "`minidist train --data numbers --checkpoint FOLDER`, and say whether each is right."
    )
    parser.add_argument(
        "text",
        metavar="TEXT",
        nargs="*",
        help="a number in words of the language that the model reads, or in digits; without one, "
        "the lines of standard input",
    )
    parser.add_argument(
        "--checkpoint", metavar="FOLDER", required=True, help="where the checkpoints are"
    )
    parser.add_argument(
        "--beam",
        type=BEAM,
        default=1,
        metavar="K",
        help="beginnings that are kept while it writes; 1: the most likely word each time"
        + DEFAULT,
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print a line per text, as soon as it is translated."""
    model, data = load(given.checkpoint)
    for text in given.text or (line for line in sys.stdin if line.strip()):
        translation = translate(model, data, text, given.beam)
        right = "  (right)" if translation.written == translation.right else ""
        print(f"{translation}{right}", flush=True)
    return 0
