"""`minidist train`: its options, and the settings that they make."""

import argparse
from dataclasses import fields

from minidist.checkpoint import Keep
from minidist.checkpoint.checks import MOST_STEPS
from minidist.cli.arguments import (
    DEFAULT,
    RANKS,
    SEED,
    STEPS,
    add_device,
    add_timeout,
    add_transport,
    number,
    option_of,
    whole,
)
from minidist.cli.presets import PRESETS, chosen
from minidist.cli.servers import add_servers
from minidist.datasets.pairs import DIRECTIONS
from minidist.kinds import KINDS
from minidist.pipeline_parallel.actions import updates
from minidist.pipeline_parallel.schedules import SCHEDULES, programs
from minidist.settings import Settings

SYNCHRONOUS = [name for name in SCHEDULES if not updates(programs(name, 1, 2))]
MEMORY = "a model's weights and activations have to fit in memory"
BATCH = whole(1_048_576, MEMORY)
LR = number("a learning rate", 1e30, "no loss is finite long before")
DROPOUT = number("a rate", 0.999, "some activations have to stay")
WEIGHT = number("a weight", 1e6, "the other losses have weight 1")
ZERO = whole(1, "the ranks of a training share the optimizer's state alone", least=0)
PRECISIONS = ["float32", "float16", "bfloat16"]
SETTINGS = {  # of each field of Settings: how its option is read, and what it is
    "steps": ({"type": STEPS}, "updates of the weights"),
    "batch": ({"type": BATCH}, "windows, images or pairs per update, over all ranks"),
    "context": ({"type": whole(4096, MEMORY)}, "characters per window"),
    "width": ({"type": whole(2048, MEMORY)}, "model width, a multiple of --heads"),
    "heads": ({"type": whole(2048, "a head has a column of the width")}, "attention heads"),
    "depth": ({"type": whole(1000, MEMORY)}, "blocks"),
    "lr": ({"type": LR}, "highest learning rate"),
    "dropout": ({"type": DROPOUT}, "dropout rate"),
    "tied": ({"action": "store_true"}, "let the output share the embedding's weights"),
    "reconstruction": (
        {"type": WEIGHT, "metavar": "W"},
        "above 0: train the way back, too, and weight W: what one wrote tells the other the source",
    ),
    "experts": (
        {"type": whole(1000, MEMORY, least=0)},
        "experts per block, of which each position takes two; 0: none",
    ),
    "seed": ({"type": SEED}, "seed of the weights, the order of the examples, and the sample"),
    "shuffle": (
        {"action": argparse.BooleanOptionalAction},
        "the examples, anew in every epoch, which is the default; --no-shuffle: every epoch in the "
        "order of the data, to see what shuffling buys",
    ),
    "dp": ({"type": RANKS}, "ranks that split the batch (default: what --ranks leaves)"),
    "pp": ({"type": RANKS}, "ranks that split the layers"),
    "cp": ({"type": RANKS}, "ranks that split the positions of every window"),
    "tp": ({"type": RANKS}, "ranks that split the matrices"),
    "ep": ({"type": RANKS}, "ranks that split the experts, a divisor of --dp"),
    "zero": ({"type": ZERO, "choices": [0, 1]}, "1: copies share the optimizer's state (ZeRO)"),
    "schedule": (
        {"choices": SYNCHRONOUS, "metavar": "NAME"},
        f"schedule of the pipeline, used if --pp is above 1: {', '.join(SYNCHRONOUS)}",
    ),
    "micro_batches": ({"type": BATCH}, "micro-batches per pipeline and update"),
    "precision": (
        {"choices": PRECISIONS, "metavar": "DTYPE"},
        f"of weights, activations and gradients: {', '.join(PRECISIONS)}",
    ),
}
OF_NUMBERS = {"direction": "en-zh", "by": "words"}  # options, and their defaults


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them.

    A setting that is not given is None, and has the default of the data (`settings_of`).
    """
    parser.add_argument(
        "--ranks",
        type=RANKS,
        help="how many (default: dp x pp x cp x tp; without these 4, or all processes of MPI)",
    )
    parser.add_argument(
        "--strategy",
        choices=PRESETS,
        metavar="NAME",
        help="what the ranks split, in place of the options for each axis: "
        + "; ".join(f"{name}: {preset.words}" for name, preset in PRESETS.items()),
    )
    for field in fields(Settings):
        how, meaning = SETTINGS[field.name]
        parser.add_argument(
            option_of(field.name),
            default=None,
            help=meaning + _defaults(field.name, field.default),
            **how,
        )
    parser.add_argument(
        "--data",
        choices=KINDS,
        default="text",
        help="what to learn; "
        + "; ".join(
            f"{name} takes none of {', '.join(map(option_of, kind.refused))}"
            for name, kind in KINDS.items()
            if kind.refused
        )
        + DEFAULT,
    )
    parser.add_argument(
        "--text", metavar="FILE", help="a UTF-8 file to learn (default: the help topics of Python)"
    )
    parser.add_argument(
        "--direction",
        choices=DIRECTIONS,
        help=f"of numbers: English to Chinese, or back (default: {OF_NUMBERS['direction']})",
    )
    parser.add_argument(
        "--by",
        choices=["words", "characters"],
        help=f"of numbers: what a token is (default: {OF_NUMBERS['by']})",
    )
    parser.add_argument(
        "--sample",
        type=whole(10_000, "each is a pass of the model", least=0),
        metavar="N",
        help="characters to sample at the end (default: 300), or numbers to show (default: 10)",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        help="save weights, optimizer and step there: the last two checkpoints are kept",
    )
    parser.add_argument(
        "--every", type=STEPS, metavar="N", help=f"save every N updates (default: {Keep.every})"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint, on this mesh or another",
    )
    parser.add_argument(
        "--resume-from",
        type=whole(MOST_STEPS, "the number of a step has 63 bits", least=0),
        metavar="STEP",
        help="go on from the checkpoint of this step; newer ones are renamed, not removed",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="when a rank dies, go on from the last checkpoint with the ranks that are left",
    )
    add_servers(parser)
    add_timeout(parser)
    add_transport(parser)
    add_device(parser)


def _defaults(name: str, default) -> str:
    """Return a setting's default in words, with those of kinds of data that have another."""
    if name == "dp" or isinstance(default, bool):
        return ""
    others = [
        f"; {kind}: {own.defaults[name]}" for kind, own in KINDS.items() if name in own.defaults
    ]
    return f" (default: {default}{''.join(others)})"


def settings_of(given: argparse.Namespace, default: int) -> Settings:
    """Return the settings that are given, by name, by strategy or by default.

    default  ranks, if no number is given
    """
    asked = {field.name: getattr(given, field.name) for field in fields(Settings)}
    asked = {name: value for name, value in asked.items() if value is not None}
    if given.strategy is not None:
        asked |= chosen(given.strategy, given.ranks or default, asked)
    asked = KINDS[given.data].defaults | asked
    return Settings(**asked | {"dp": _data_parallel_ranks(given.ranks, asked, default)})


def _data_parallel_ranks(ranks: int | None, asked: dict, default: int) -> int:
    """Return dp; where it is not given it follows from the rest. `default`: ranks, if none is."""
    pp, cp, tp, ep = (asked.get(axis, 1) for axis in ("pp", "cp", "tp", "ep"))
    dp, rest = asked.get("dp"), pp * cp * tp
    if dp is None:
        dp = (ranks or (default if rest * ep == 1 else rest * ep)) // rest
    if ranks not in (None, dp * rest) or dp < 1:
        context = f" x --cp {cp}" * (cp > 1)
        raise ValueError(
            f"--ranks {ranks} is not --dp {dp or 1} x --pp {pp}{context} x --tp {tp}; leave "
            "--ranks out"
        )
    return dp
