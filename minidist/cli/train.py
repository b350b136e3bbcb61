"""`minidist train`: train a small model on several ranks, then certify its gradients."""

import argparse
import time
from dataclasses import fields

from minidist import nn
from minidist.backend import check_device, float_dtype
from minidist.checkpoint import Keep, Saved
from minidist.checkpoint.grow import changes
from minidist.checkpoint.training import place
from minidist.cli.arguments import (
    DEFAULT,
    add_device,
    add_timeout,
    add_transport,
    check_several,
    from_zero,
    option_of,
    whole,
)
from minidist.cli.outcomes import outcome, sizes, target
from minidist.cli.servers import add_servers, plan_of, serve, who_has_what
from minidist.comm import mpi, nccl
from minidist.comm import run as run_on_ranks
from minidist.data_parallel.server_plan import Plan
from minidist.datasets import Text, digit_images, numbers, text
from minidist.datasets.pairs import DIRECTIONS
from minidist.elastic import train_elastic
from minidist.kinds import KINDS, Data, kind_of
from minidist.pipeline_parallel.actions import updates
from minidist.pipeline_parallel.schedules import SCHEDULES, programs
from minidist.presets import PRESETS, chosen
from minidist.tools.certificate import certify
from minidist.tools.compare import BOUND
from minidist.train import Settings, told, train, windows
from minidist.train_with_servers import workers_among

SYNCHRONOUS = [name for name in SCHEDULES if not updates(programs(name, 1, 2))]
PRECISIONS = ["float32", "float16", "bfloat16"]
SETTINGS = {  # of each field of Settings: how its option is read, and what it is
    "steps": ({"type": whole}, "updates of the weights"),
    "batch": ({"type": whole}, "windows, images or pairs per update, over all ranks"),
    "context": ({"type": whole}, "characters per window"),
    "width": ({"type": whole}, "model width, a multiple of --heads"),
    "heads": ({"type": whole}, "attention heads"),
    "depth": ({"type": whole}, "blocks"),
    "lr": ({"type": float}, "highest learning rate"),
    "dropout": ({"type": float}, "dropout rate"),
    "tied": ({"action": "store_true"}, "let the output share the embedding's weights"),
    "reconstruction": (
        {"type": float, "metavar": "W"},
        "above 0: train the way back, too, and weight W: what one wrote tells the other the source",
    ),
    "experts": (
        {"type": from_zero},
        "experts per block, of which each position takes two; 0: none",
    ),
    "seed": ({"type": from_zero}, "seed of the weights, the order of the examples, and the sample"),
    "shuffle": (
        {"action": argparse.BooleanOptionalAction},
        "the examples, anew in every epoch, which is the default; --no-shuffle: every epoch in the "
        "order of the data, to see what shuffling buys",
    ),
    "dp": ({"type": whole}, "ranks that split the batch (default: what --ranks leaves)"),
    "pp": ({"type": whole}, "ranks that split the layers"),
    "cp": ({"type": whole}, "ranks that split the positions of every window"),
    "tp": ({"type": whole}, "ranks that split the matrices"),
    "ep": ({"type": whole}, "ranks that split the experts, a divisor of --dp"),
    "zero": ({"type": int, "choices": [0, 1]}, "1: copies share the optimizer's state (ZeRO)"),
    "schedule": (
        {"choices": SYNCHRONOUS, "metavar": "NAME"},
        f"schedule of the pipeline, used if --pp is above 1: {', '.join(SYNCHRONOUS)}",
    ),
    "micro_batches": ({"type": whole}, "micro-batches per pipeline and update"),
    "precision": (
        {"choices": PRECISIONS, "metavar": "DTYPE"},
        f"of weights, activations and gradients: {', '.join(PRECISIONS)}",
    ),
}


OF_NUMBERS = {"direction": "en-zh", "by": "words"}  # options, and their defaults


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments.

    A setting that is not given is None, and has the default of the data (`settings_of`).
    """
    parser.description = (
        "Train a small character Transformer on real text, a convolutional network on images of "
        "digits, or a translator of numbers in words, with several worker processes that sum their "
        "gradients; then show that, on the trained weights, these gradients equal one device's."
    )
    parser.add_argument(
        "--ranks",
        type=whole,
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
        type=from_zero,
        metavar="N",
        help="characters to sample at the end (default: 300), or numbers to show (default: 10)",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        help="save weights, optimizer and step there: the last two checkpoints are kept",
    )
    parser.add_argument(
        "--every", type=whole, metavar="N", help=f"save every N updates (default: {Keep.every})"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint, on this mesh or another",
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
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Train, sample, certify; return 1 if the ranks' gradients are not one device's."""
    check_device(given.device)
    plan = plan_of(given)
    default = 4
    if given.transport == "mpi":
        default = mpi.processes()
        if not (given.ranks or given.dp):
            check_several(default)
    settings = settings_of(given, default)
    programs(settings.schedule, settings.pp, settings.micro_batches)  # raises what ranks would
    float_dtype(settings.precision)  # likewise
    if settings.precision == "bfloat16" and given.device != "cpu":
        raise ValueError("bfloat16 is NumPy's and ml_dtypes', not CuPy's; use --precision float16")
    data = _data(given, settings)
    windows(data, settings)  # likewise
    if plan is not None:
        workers_among(settings.ranks, settings, plan)  # likewise
    keep = _keep(given)
    first = _first_step(keep, told(data, settings), settings.steps)
    if given.transport == "nccl":
        nccl.check_ranks(settings.ranks, given.device)
    model = settings.model(data)
    state, settings = _train(given, settings, data, model, keep, first, plan)
    model.load_state(state)
    print(outcome(model, data, given.sample, settings.seed), end="")
    servers = 0 if plan is None else plan.servers
    row = certify(model, data, settings, given.transport, given.device, servers)
    against = (
        "against one device" if given.device == "cpu" else f"on {given.device} against the host"
    )
    print(
        f"certificate: {'ok' if row['ok'] else 'FAILED'}. {_counted(settings.ranks)} {against}, "
        f"in float64, {row['case']}:\n"
        f"  largest gradient difference {row['difference']:.1e}; {row['detail']}; "
        f"allowed {BOUND:.0e}"
    )
    return 0 if row["ok"] else 1


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


def _data(given, settings: Settings) -> Data:
    """Return what to learn; ValueError if an option is of other data."""
    if given.data != "text" and given.text is not None:
        raise ValueError(
            f"--data {given.data} learns {KINDS[given.data].unit}, not the file of --text; leave "
            "one of the two out"
        )
    of_numbers = {name: getattr(given, name) or own for name, own in OF_NUMBERS.items()}
    for option in OF_NUMBERS:
        if given.data != "numbers" and getattr(given, option) is not None:
            raise ValueError(f"--{option} is an option of --data numbers; leave it out")
    if given.data != "text":
        return digit_images() if given.data == "digits" else numbers(**of_numbers)
    corpus = text(given.text, settings.context)
    if given.resume and given.checkpoint is not None:  # the model has its characters
        before = Saved.newest(given.checkpoint).about.get("told", {}).get("data", {})
        corpus = corpus.including(before.get("characters", ""))
    return corpus


def _keep(given) -> Keep | None:
    if given.checkpoint is None and given.resume:
        raise ValueError("--resume needs --checkpoint FOLDER, where the checkpoints are")
    if given.every is not None and given.checkpoint is None:
        raise ValueError("--every needs --checkpoint FOLDER, where the checkpoints will be")
    if given.elastic and given.checkpoint is None:
        raise ValueError("--elastic needs --checkpoint FOLDER, to go on from")
    if given.elastic and given.transport == "mpi":
        raise ValueError(
            "--elastic needs --transport process: MPI ends all ranks when one dies; start the "
            "command again with --resume, and mpiexec with fewer ranks"
        )
    if given.elastic and given.transport != "process":
        raise ValueError(f"--elastic needs --transport process, not {given.transport}")
    if given.checkpoint is None:
        return None
    return Keep(given.checkpoint, given.every or Keep.every, given.resume)


def _first_step(keep: Keep | None, run: dict, steps: int) -> int:
    """Return the step that the run begins with; print what it goes on from."""
    saved = keep and keep.newest(run)
    if not saved:
        return 0
    grows = changes(saved.about["told"], run)
    first = place(saved, grows)[1]
    over = [] if first < steps else [f"no update is left of --steps {steps}"]
    print("; ".join([f"goes on after step {saved.step}, from {saved.path}", *grows, *over]))
    return first


def _train(
    given,
    settings: Settings,
    data: Data,
    model: nn.Module,
    keep: Keep | None,
    first: int,
    plan: Plan | None,
) -> tuple[dict, Settings]:
    """Train on the ranks, print what goes in and how far it comes; return weights and mesh."""
    size = sum(p.size for p in model.parameters() if p.requires_grad)
    kind, ranks = kind_of(data), settings.ranks
    who = _who_has_what(settings) if plan is None else who_has_what(plan)
    print(
        f"{kind.told(data)['source']}: {sizes(data)}; {size:,} parameters\n{_counted(ranks)}, "
        f"{who} {settings.batch} {kind.unit}",
        flush=True,
    )
    begin = time.perf_counter()
    where = {"device": given.device, "timeout": given.timeout}
    if given.elastic:
        losses, state, settings = train_elastic(data, settings, keep, **where)
    elif plan is not None:
        where["transport"] = given.transport
        folder = keep and keep.folder
        losses, state, seconds = serve(data, settings, plan, folder, given.replay, **where)
    else:
        where["transport"] = given.transport
        losses, state = run_on_ranks(train, ranks, data, settings, keep, **where)[0]
    mean = sum(losses[-20:]) / len(losses[-20:])
    seconds = time.perf_counter() - begin if plan is None else seconds
    print(
        f"{_counted(len(losses) - first, 'step')} in {seconds:.0f} s: "
        f"loss {losses[0]:.3f} -> {mean:.3f} nats/{target(data)}"
    )
    if isinstance(data, Text):
        bigram = data.bigram_entropy()
        print(
            f"bigram entropy of the text: {bigram:.3f} nats/character; "
            f"the model's loss is {'below' if mean < bigram else 'not below'} it"
        )
    return state, settings


def _counted(number: int, what: str = "rank") -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _who_has_what(settings: Settings) -> str:
    if not settings.on_mesh:
        return "each with its part of every batch of"
    axes = {"data": settings.dp, "pipeline": settings.pp, "tensor": settings.tp}
    if settings.cp > 1:
        axes = {"data": settings.dp, "pipeline": settings.pp, "context": settings.cp} | axes
    mesh = f"{' x '.join(map(str, axes.values()))} ({', '.join(axes)})"
    mesh += f", experts over {settings.ep}" * (settings.ep > 1)
    return mesh + f", ZeRO stage {settings.zero}" * settings.zero + ", for batches of"


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
