"""`minidist train`: train a small Transformer on several ranks, then certify its gradients."""

import argparse
import time
from dataclasses import fields

from minidist import nn
from minidist.backend import check_device
from minidist.cli.arguments import (
    DEFAULT,
    add_device,
    add_timeout,
    add_transport,
    check_several,
    from_zero,
    whole,
)
from minidist.comm import mpi, nccl
from minidist.comm import run as run_on_ranks
from minidist.datasets import Text, text
from minidist.pipeline_parallel.schedules import SCHEDULES, programs, updates
from minidist.sampling import sample
from minidist.tools.certificate import certify
from minidist.tools.compare import BOUND
from minidist.train import Settings, train, windows

SYNCHRONOUS = [name for name in SCHEDULES if not updates(programs(name, 1, 1))]
SETTINGS = {  # of each field of Settings: how its option is read, and what it is
    "steps": ({"type": whole}, "updates of the weights"),
    "batch": ({"type": whole}, "windows per update, over all ranks"),
    "context": ({"type": whole}, "characters per window"),
    "width": ({"type": whole}, "model width, a multiple of --heads"),
    "heads": ({"type": whole}, "attention heads"),
    "depth": ({"type": whole}, "blocks"),
    "lr": ({"type": float}, "highest learning rate"),
    "dropout": ({"type": float}, "dropout rate"),
    "tied": ({"action": "store_true"}, "let the output share the embedding's weights"),
    "seed": ({"type": from_zero}, "seed of the weights, the order of the examples, and the sample"),
    "dp": ({"type": whole}, "ranks that split the batch (default: what --ranks leaves)"),
    "pp": ({"type": whole}, "ranks that split the layers"),
    "tp": ({"type": whole}, "ranks that split the matrices"),
    "schedule": (
        {"choices": SYNCHRONOUS, "metavar": "NAME"},
        f"schedule of the pipeline, used if --pp is above 1: {', '.join(SYNCHRONOUS)}",
    ),
    "micro_batches": ({"type": whole}, "micro-batches per pipeline and update"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments; their defaults are those of Settings."""
    parser.description = (
        "Train a small character Transformer on real text with several worker processes that sum "
        "their gradients; then show that on the trained weights they equal one device's."
    )
    parser.add_argument(
        "--ranks",
        type=whole,
        help="how many (default: dp x pp x tp; without these 4, or all processes of MPI)",
    )
    for field in fields(Settings):
        how, meaning = SETTINGS[field.name]
        shown = DEFAULT if field.name != "dp" and field.default is not False else ""
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            default=field.default if field.name != "dp" else None,
            help=meaning + shown,
            **how,
        )
    parser.add_argument(
        "--text", metavar="FILE", help="a UTF-8 file to learn (default: the help topics of Python)"
    )
    parser.add_argument(
        "--sample",
        type=from_zero,
        default=300,
        metavar="N",
        help="characters to sample at the end" + DEFAULT,
    )
    add_timeout(parser)
    add_transport(parser)
    add_device(parser)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Train, sample, certify; return 1 if the ranks' gradients are not one device's."""
    check_device(given.device)
    default = 4
    if given.transport == "mpi":
        default = mpi.processes()
        if not (given.ranks or given.dp):
            check_several(default)
    given.dp = _data_parallel_ranks(given.ranks, given.dp, given.pp, given.tp, default)
    settings = Settings(**{field.name: getattr(given, field.name) for field in fields(Settings)})
    programs(given.schedule, given.pp, given.micro_batches)  # raises what the ranks would raise
    corpus = text(given.text, given.context)
    windows(corpus, settings)  # likewise
    if given.transport == "nccl":
        nccl.check_ranks(settings.ranks, given.device)
    model = settings.model(corpus.vocab)
    model.load_state(_train(given, settings, corpus, model))
    if given.sample > 0:
        first = corpus.decode(corpus.tokens[:1])
        print(f"\n{sample(model, corpus, first, given.sample, given.seed)}\n")
    row = certify(model, corpus, settings, given.transport, given.device)
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


def _train(given, settings: Settings, corpus: Text, model: nn.Transformer) -> dict:
    """Train on the ranks, print what goes in and how far it comes; return the weights."""
    size = sum(p.size for p in model.parameters())
    ranks = settings.ranks
    print(
        f"{corpus.source}: {len(corpus.tokens):,} characters, {corpus.vocab} different; "
        f"{size:,} parameters\n"
        f"{_counted(ranks)}, {_who_has_what(settings)} {settings.batch} windows",
        flush=True,
    )
    bigram, begin = corpus.bigram_entropy(), time.perf_counter()
    losses, state = run_on_ranks(
        train,
        ranks,
        corpus,
        settings,
        transport=given.transport,
        timeout=given.timeout,
        device=given.device,
    )[0]
    mean, seconds = sum(losses[-20:]) / len(losses[-20:]), time.perf_counter() - begin
    print(
        f"{settings.steps} steps in {seconds:.0f} s: "
        f"loss {losses[0]:.3f} -> {mean:.3f} nats/character\n"
        f"bigram entropy of the text: {bigram:.3f} nats/character; "
        f"the model's loss is {'below' if mean < bigram else 'not below'} it"
    )
    return state


def _counted(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"


def _who_has_what(settings: Settings) -> str:
    if settings.pp == settings.tp == 1:
        return "each with its part of every batch of"
    mesh = f"{settings.dp} x {settings.pp} x {settings.tp}"
    return f"{mesh} (data, pipeline, tensor), for batches of"


def _data_parallel_ranks(ranks: int | None, dp: int | None, pp: int, tp: int, default: int) -> int:
    """Return dp; where it is not given it follows from the rest. `default`: ranks, if none is."""
    if dp is None:
        dp = (ranks or (default if pp * tp == 1 else pp * tp)) // (pp * tp)
    if ranks not in (None, dp * pp * tp) or dp < 1:
        raise ValueError(
            f"--ranks {ranks} is not --dp {dp or 1} x --pp {pp} x --tp {tp}; leave --ranks out"
        )
    return dp
