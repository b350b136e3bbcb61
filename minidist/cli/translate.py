"""`minidist translate`: translate numbers in words with a model that `minidist train` has saved."""

import argparse
import sys

from minidist.cli.arguments import add_option, whole
from minidist.training.kinds.numbers import load
from minidist.training.translation import translate

BEAM = whole(1000, "all beginnings are decoded together, in a second or so")


EXAMPLES = (
    "minidist translate 321 --checkpoint run",
    'minidist translate 321 "twenty million five" --checkpoint run',
    "minidist translate 99999999 --checkpoint run --beam 8",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = (
        "Translate numbers in words, English to Chinese or back, with the newest checkpoint of "
        "`minidist train --data numbers --checkpoint FOLDER`, and say whether each is right."
    )
    words = "a number in words of the language that the model reads, or in digits; without one, "
    add_option(parser, "text", words + "the lines of standard input", metavar="TEXT", nargs="*")
    folder = "where the checkpoints are"
    add_option(parser, "--checkpoint", folder, metavar="FOLDER", required=True)
    words = "beginnings that are kept while it writes; 1: the most likely word each time"
    add_option(parser, "--beam", words, BEAM, "K", default=1)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print a line per text, as soon as it is translated."""
    model, data = load(given.checkpoint)
    for text in given.text or (line for line in sys.stdin if line.strip()):
        translation = translate(model, data, text, given.beam)
        right = "  (right)" if translation.written == translation.right else ""
        print(f"{translation}{right}", flush=True)
    return 0
