"""Strategies by name: how each lays out a number of ranks (`minidist train --strategy NAME`).

The names are those in `minidist strategies`, where it has the strategy. A preset is a set of
settings; an axis that it does not name has one rank, so that each preset shows one idea.
"""

from collections.abc import Mapping
from itertools import cycle
from typing import NamedTuple

from minidist.cli.arguments import option_of
from minidist.errors import WrongInput

ALONE = {"dp": 1, "pp": 1, "cp": 1, "tp": 1, "ep": 1, "zero": 0}


class Preset(NamedTuple):
    """What the ranks split, in words, the axis that they make up, and other settings.

    axis     "": see mesh_of
    servers  how many of the ranks are parameter servers, if no other number is asked for
    """

    words: str
    axis: str
    more: Mapping[str, int | str] = {}
    servers: int = 0


def mesh_of(ranks: int) -> dict[str, int]:
    """Deal the prime factors of the ranks to dp, pp, tp, dp, ...: the largest first."""
    from minidist.planning.tofu import prime_factors  # here: commands start faster

    sizes = {"dp": 1, "pp": 1, "tp": 1}
    for axis, factor in zip(cycle(sizes), prime_factors(ranks), strict=False):
        sizes[axis] *= factor
    return sizes


PRESETS = {
    "naive": Preset("the batch", "dp"),
    "zero_1": Preset("the batch and the optimizer's state", "dp", {"zero": 1}),
    "zero_2": Preset("the batch, the optimizer's state and gradients", "dp", {"zero": 2}),
    "zero_3": Preset("the batch and all that a rank keeps of the model", "dp", {"zero": 3}),
    "gpipe": Preset(
        "the layers, all forward passes before all backward", "pp", {"schedule": "gpipe"}
    ),
    "1f1b": Preset("the layers, forward and backward in turns", "pp", {"schedule": "1f1b"}),
    "tensor": Preset("attention heads, matrices and vocabularies", "tp"),
    "hybrid": Preset("batch, layers and matrices, 2 x 2 x 2 on 8 ranks", ""),
    "downpour": Preset(
        "the batch, without waiting for each other, over workers of parameter servers",
        "dp",
        servers=1,
    ),
}


def chosen(name: str, ranks: int, asked: Mapping) -> dict:
    """Return the settings of a preset for a number of ranks.

    asked  settings that were given; ValueError if the preset has another value for one of them
    """
    preset = PRESETS[name]
    mesh = {preset.axis: ranks} if preset.axis else mesh_of(ranks)
    settings = ALONE | mesh | dict(preset.more)
    for setting, value in settings.items():
        if asked.get(setting, value) != value:
            raise WrongInput(
                f"--strategy {name} on {ranks} ranks has {setting}={value}, not "
                f"{asked[setting]}; leave {option_of(setting)} or --strategy out"
            )
    return settings
