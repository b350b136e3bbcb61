"""`minidist train`: its options, and the settings that they make."""

import argparse
from dataclasses import Field, fields

from minidist.checkpoint import Keep, Saved
from minidist.checkpoint.checks import MOST_STEPS
from minidist.checkpoint.run_checkpoints import description_in
from minidist.cli.arguments import (
    RANKS,
    STEPS,
    add_device,
    add_flag,
    add_option,
    add_timeout,
    add_transport,
    option_of,
    reader,
    whole,
)
from minidist.cli.presets import PRESETS, chosen
from minidist.cli.servers import add_servers
from minidist.errors import WrongInput
from minidist.pipeline_parallel.schedules import SCHEDULES
from minidist.training.kinds import KINDS, Data
from minidist.training.kinds.text import MODELS
from minidist.training.settings import OF_MESHES, Settings

CHOICES: dict[str, list] = {  # of settings
    "model": [*MODELS],
    "optimizer": ["adamw", "muon"],
    "zero": [0, 1, 2, 3],
    "schedule": [name for name, own in SCHEDULES.items() if not own.asynchronous],
    "precision": ["float32", "float16", "bfloat16", "bfloat16-stochastic", "float8"],
}

SETTINGS = {setting.name: setting for setting in fields(Settings)}

NEED_A_FOLDER = {  # options that need a folder of checkpoints, and for what
    "resume": "where the checkpoints are",
    "resume_from": "where the checkpoints are",
    "every": "where the checkpoints will be",
    "elastic": "to go on from",
}


def _add_data(group: argparse._ArgumentGroup) -> None:
    words = "what to learn"
    for name, kind in KINDS.items():
        if kind.refused:
            words += f"; {name} takes none of {', '.join(map(option_of, kind.refused))}"
    add_option(group, "--data", words, choices=KINDS, default="text")
    for kind in KINDS.values():
        for name, how in kind.options.items():
            group.add_argument(option_of(name), **how)


def _add_mesh(group: argparse._ArgumentGroup) -> None:
    words = "how many (default: dp x pp x cp x tp; without these 4, or all processes of MPI)"
    add_option(group, "--ranks", words, RANKS)
    words = "what the ranks split, in place of the options for each axis: "
    words += "; ".join(f"{name}: {preset.words}" for name, preset in PRESETS.items())
    add_option(group, "--strategy", words, metavar="NAME", choices=PRESETS)


def _add_shown(group: argparse._ArgumentGroup) -> None:
    sample = whole(10_000, "each is a pass of the model", least=0)
    words = "characters to sample at the end (default: 300), or numbers to show (default: 10)"
    add_option(group, "--sample", words, sample, "N")
    words = "write a row per step as CSV: loss, learning rate, seconds, and bytes that rank 0 sent "
    words += "(with servers, the first worker); a run that goes on keeps the rows before its step"
    add_option(group, "--log", words, metavar="FILE")
    add_option(group, "--plot", "draw loss and learning rate: .png, .pdf or .svg", metavar="FILE")


def _add_saving(group: argparse._ArgumentGroup) -> None:
    words = "save weights, optimizer and step there: the last two checkpoints are kept"
    add_option(group, "--checkpoint", words, metavar="FOLDER")
    add_option(group, "--every", f"save every N updates (default: {Keep.every})", STEPS, "N")
    add_flag(group, "--resume", "go on from the newest checkpoint, on this mesh or another")
    step = whole(MOST_STEPS, "the number of a step has 63 bits", least=0)
    words = "go on from the checkpoint of this step; newer ones are renamed, not removed"
    add_option(group, "--resume-from", words, step, "STEP")
    words = "when a rank dies, go on from the last checkpoint with the ranks that are left"
    add_flag(group, "--elastic", words)


MODEL = "model width heads kv_heads depth dropout tied experts reconstruction precision".split()
GROUPS: dict = {  # of options: what adds those that are no settings, and the settings
    "data": (_add_data, ["batch", "context", "shuffle"]),
    "model": (lambda group: None, MODEL),
    "updates": (lambda group: None, ["steps", "lr", "optimizer", "seed"]),
    "mesh": (_add_mesh, OF_MESHES),
    "what is shown": (_add_shown, []),
    "saving": (_add_saving, []),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist train`, a group for each of the questions of who trains a model.

    A setting that is not given is None, and has the default of the data (`settings_of`).
    """
    parser.usage = "minidist train [options]"
    for name, (add_first, settings) in GROUPS.items():
        group = parser.add_argument_group(name)
        add_first(group)
        for setting in settings:
            _add_setting(group, SETTINGS[setting])
    add_servers(parser)
    machine = parser.add_argument_group("machine")
    add_timeout(machine)
    add_transport(machine)
    add_device(machine)


def _add_setting(group: argparse._ArgumentGroup, setting: Field) -> None:
    """Add the option of a field of Settings, as its default and its metadata say."""
    name, default, words = setting.name, setting.default, setting.metadata["description"]
    how: dict = {"metavar": setting.metadata["metavar"] or None}
    if isinstance(default, bool):
        how = {"action": argparse.BooleanOptionalAction if default else "store_true"}
    elif bound := setting.metadata["bound"]:
        how["type"] = reader(bound)
    if name in CHOICES:
        how["choices"] = CHOICES[name]
        if isinstance(default, str):
            words += f": {', '.join(CHOICES[name])}"
    if name != "dp" and not isinstance(default, bool):
        own = {kind: each.defaults[name] for kind, each in KINDS.items() if name in each.defaults}
        others = "".join(f"; {kind}: {value}" for kind, value in own.items())
        words += f" (default: {default}{others})"
    group.add_argument(option_of(name), default=None, help=words, **how)


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
        context = f" x --cp {cp}" if cp > 1 else ""
        raise WrongInput(
            f"--ranks {ranks} is not --dp {dp or 1} x --pp {pp}{context} x --tp {tp}; leave "
            "--ranks out"
        )
    return dp


def data_of(given: argparse.Namespace, settings: Settings) -> Data:
    """Return what to learn; ValueError if an option is of other data."""
    for name, kind in KINDS.items():
        for option in kind.options:
            if name != given.data and getattr(given, option) is not None:
                raise WrongInput(
                    f"--{option} is an option of --data {name}, and --data {given.data} learns "
                    f"{KINDS[given.data].unit}; leave one of the two out"
                )
    kind, before = KINDS[given.data], {}
    if resumes(given):
        saved = Saved.newest(given.checkpoint, given.resume_from)
        before = (description_in(saved) or {}).get("data", {})
    asked = {option: getattr(given, option) for option in kind.options}
    return kind.read(settings, before, **asked)


def keep_of(given: argparse.Namespace) -> Keep | None:
    """Return where to save and what to go on from; ValueError if a folder or a way is missing."""
    if given.elastic and given.checkpoint is not None and given.transport == "mpi":
        raise WrongInput(
            "--elastic needs --transport process: MPI ends all ranks when one dies; start the "
            "command again with --resume, and mpiexec with fewer ranks"
        )
    if given.elastic and given.checkpoint is not None and given.transport != "process":
        raise WrongInput(f"--elastic needs --transport process, not {given.transport}")
    if given.checkpoint is not None:
        return Keep(given.checkpoint, given.every or Keep.every, resumes(given), given.resume_from)
    for option, why in NEED_A_FOLDER.items():
        if getattr(given, option) is not None and getattr(given, option) is not False:
            raise WrongInput(f"{option_of(option)} needs --checkpoint FOLDER, {why}")
    return None


def resumes(given: argparse.Namespace) -> bool:
    """Return whether the run goes on from a checkpoint."""
    return given.resume or given.resume_from is not None
