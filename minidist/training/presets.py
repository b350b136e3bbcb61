"""Strategies by name: the settings that lay out a number of ranks as a strategy needs them."""

from collections.abc import Mapping
from itertools import cycle
from typing import Any, NamedTuple

from minidist.errors import WrongInput
from minidist.pieces import prime_factors


class Preset(NamedTuple):
    """A strategy by name: settings that lay out a number of ranks; other axes have one rank.

    splits  what the ranks split, in words
    axis    that the ranks make up; "": see mesh_of
    """

    splits: str
    axis: str
    more: Mapping[str, int | str | None] = {}


PRESETS = {  # the names are those in `minidist strategies`, where it has the strategy
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
        {"servers": 1, "staleness": None, "quorum": None},
    ),
}
ALONE = {"dp": 1, "pp": 1, "cp": 1, "tp": 1, "ep": 1, "zero": 0}


def mesh_of(ranks: int) -> dict[str, int]:
    """Deal the prime factors of the ranks to dp, pp, tp, dp, ...: the largest first."""
    sizes, axes = {"dp": 1, "pp": 1, "tp": 1}, cycle(["dp", "pp", "tp"])
    for factor, axis in zip(prime_factors(ranks), axes, strict=False):
        sizes[axis] *= factor
    return sizes


def chosen(name: str, ranks: int, asked: Mapping) -> dict[str, Any]:
    """Return the settings of a preset for a number of ranks.

    asked  options that were given; ValueError if the preset has another value for one of them
    """
    preset = PRESETS[name]
    mesh = {preset.axis: ranks} if preset.axis else mesh_of(ranks)
    settings = ALONE | mesh | dict(preset.more)
    if name == "downpour":
        settings["servers"] = asked.get("servers", 1)
    for setting, value in ({"servers": None} | settings).items():
        if asked.get(setting, value) != value:
            raise WrongInput(
                f"--strategy {name} on {ranks} ranks has {setting}={value}, not "
                f"{asked[setting]}; leave --{setting} or --strategy out"
            )
    return settings
