"""The command line: parse, call, print."""

import argparse
import errno
import json
import math
import os
import sys
import time

from minidist import __version__
from minidist.course.lab_command import add_lab
from minidist.course.mutants_command import add_mutants
from minidist.errors import CommTimeout, RankFailed
from minidist.tools.compare import BOUND
from minidist.tools.timeline.command import add_timeline


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status: 1 what failed, 2 wrong input, 130 Ctrl-C."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a sampled character may be no part of ASCII
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return 2
    try:
        status = given.command(given)
        sys.stdout.flush()
        return status
    except ValueError as error:
        print(f"minidist: {error}", file=sys.stderr)
        return 2
    except RankFailed as error:
        if not isinstance(error.__cause__, ValueError):
            raise
        print(f"minidist: {error.__cause__}", file=sys.stderr)
        return 2
    except CommTimeout as error:
        print(f"minidist: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nminidist: interrupted; all ranks have stopped", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left to flush
        if error.errno == errno.ENOSPC:  # else the reader has gone: `minidist verify | head`
            print(f"minidist: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1


def _open_closed_streams() -> None:
    """Replace each standard stream that the caller has closed (`minidist verify >&-`) by /dev/null.

    Its number would go to the next file or socket, into which somebody would then print.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            os.set_inheritable(opened, opened == number)
            setattr(sys, name, open(opened, mode, closefd=False))


def _whole(text: str, least: int = 1) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
    return int(text)


def _from_zero(text: str) -> int:
    return _whole(text, 0)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        prog="minidist",
        description="Distributed deep learning from scratch, proved equal to one device.",
    )
    parser.set_defaults(command=None)
    parser.add_argument("--version", action="version", version=f"minidist {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    train = commands.add_parser(
        "train",
        formatter_class=formatter,
        help="train a character Transformer on several ranks, then certify its gradients",
        description="Train a small character Transformer on real text "
        "with several worker processes that sum their gradients; "
        "then show that on the trained weights they equal one device's.",
    )
    train.set_defaults(command=_train)
    train.add_argument(
        "--ranks", type=_whole, help="worker processes: dp x pp x tp, or 4 if none is given"
    )
    train.add_argument("--dp", type=_whole, help="ranks that split the batch")
    train.add_argument("--pp", type=_whole, default=1, help="ranks that split the layers")
    train.add_argument("--tp", type=_whole, default=1, help="ranks that split the matrices")
    train.add_argument("--schedule", default="1f1b", help="of the pipeline, if --pp is above 1")
    train.add_argument("--micro-batches", type=_whole, default=4, help="of each pipeline")
    train.add_argument(
        "--text",
        metavar="FILE",
        default=None,
        help="a UTF-8 file to learn; without it, the help topics of Python",
    )
    train.add_argument("--steps", type=_whole, default=400, help="updates of the weights")
    train.add_argument(
        "--batch", type=_whole, default=32, help="windows per update, over all ranks"
    )
    train.add_argument("--context", type=_whole, default=64, help="characters per window")
    train.add_argument(
        "--width", type=_whole, default=64, help="model width, a multiple of --heads"
    )
    train.add_argument("--heads", type=_whole, default=4, help="attention heads")
    train.add_argument("--depth", type=_whole, default=2, help="blocks")
    train.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    train.add_argument("--dropout", type=float, default=0.0, help="rate")
    train.add_argument(
        "--tied", action="store_true", help="let the output share the embedding's weights"
    )
    train.add_argument(
        "--seed", type=_from_zero, default=0, help="of weights, order of examples, and sample"
    )
    train.add_argument(
        "--sample",
        type=_from_zero,
        default=300,
        metavar="N",
        help="characters to sample at the end",
    )
    train.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="give up after so long")
    _common(train)

    verify = commands.add_parser(
        "verify",
        formatter_class=formatter,
        help="compare every strategy's gradients and bytes with one device's and with the formulas",
        description="Run strategies on real ranks in float64 "
        "and compare every parameter's gradient with one device's, "
        "and the bytes moved with their closed form. Exit status 1 if any differs.",
    )
    verify.set_defaults(command=_verify)
    verify.add_argument(
        "--strategy", action="append", metavar="NAME", help="only this one; may be repeated"
    )
    verify.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    _common(verify, device=False)

    add_timeline(commands, formatter, _whole, _seconds)
    add_mutants(commands, formatter)
    add_lab(commands, formatter, _from_zero, _seconds)

    bench = commands.add_parser(
        "bench",
        formatter_class=formatter,
        help="measure steps, communication and pipelines against PyTorch, MPI and gloo",
        description="step: time training steps on one BLAS thread, in float32, "
        "interleaved with PyTorch eager. "
        "comm: time all_reduce, messages and data parallelism, "
        "interleaved with MPICH, gloo and DDP. "
        "pipeline: time two pipelined ranks, interleaved with one process and with PyTorch's. "
        "Peers are development-time extras (pip install 'minidist[bench]'); "
        "where one is missing or fails, its rows say why. Rows are printed as they are measured. "
        "Medians of the rounds; ratio is ours over theirs, limit what it should be at most.",
    )
    bench.set_defaults(command=_bench)
    bench.add_argument(
        "what",
        metavar="WORKLOAD",
        nargs="?",
        choices=("step", "comm", "pipeline"),
        default="step",
        help="step, comm or pipeline",
    )
    bench.add_argument("--rounds", type=_whole, default=5, help="interleaved repeats")
    bench.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    return parser


def _common(parser: argparse.ArgumentParser, device: bool = True) -> None:
    parser.add_argument(
        "--transport", choices=("process", "thread"), default="process", help="what a rank is"
    )
    if device:
        parser.add_argument(
            "--device", choices=("cpu", "gpu"), default="cpu", help="where the arrays live"
        )


def _train(given) -> int:
    from minidist.comm import run
    from minidist.datasets import text
    from minidist.pipeline_parallel.schedules import programs
    from minidist.train import Settings, certify, sample, train, windows

    given.ranks, given.dp = _mesh(given.ranks, given.dp, given.pp, given.tp)
    settings = Settings(**{name: getattr(given, name) for name in Settings.__dataclass_fields__})
    programs(given.schedule, given.pp, given.micro_batches)  # an error, if there is one, at once
    corpus = text(given.text, given.context)
    windows(corpus, settings)  # likewise
    model = settings.model(corpus.vocab)
    bigram = corpus.bigram_entropy()
    size = sum(p.size for p in model.parameters())
    print(
        f"{corpus.source}: {len(corpus.tokens):,} characters, {corpus.vocab} different; "
        f"{size:,} parameters"
    )
    print(
        f"{given.ranks} rank{'s' * (given.ranks > 1)}, {_who_has_what(given)} "
        f"{given.batch} windows",
        flush=True,
    )
    begin = time.perf_counter()
    losses, state = run(
        train,
        given.ranks,
        corpus,
        settings,
        transport=given.transport,
        timeout=given.timeout,
        device=given.device,
    )[0]
    mean, seconds = sum(losses[-20:]) / len(losses[-20:]), time.perf_counter() - begin
    below = "below" if mean < bigram else "not below"
    print(
        f"{settings.steps} steps in {seconds:.0f} s: "
        f"loss {losses[0]:.3f} -> {mean:.3f} nats/character"
    )
    print(f"bigram entropy of the text: {bigram:.3f} nats/character; the model is {below} it")
    model.load_state(state)
    if given.sample > 0:
        first = corpus.decode(corpus.tokens[:1])
        print(f"\n{sample(model, corpus, first, given.sample, given.seed)}\n")
    row = certify(model, corpus, settings, given.transport)
    verdict = "ok" if row["ok"] else "FAILED"
    print(
        f"certificate: {verdict}. {given.ranks} ranks against one device, in float64, "
        f"{row['case']}:"
    )
    print(f"  largest gradient difference {row['difference']:.1e}; {row['detail']}, allowed 1e-09")
    return 0 if row["ok"] else 1


def _who_has_what(given) -> str:
    if given.pp == given.tp == 1:
        return "each with its part of every batch of"
    return f"{given.dp} x {given.pp} x {given.tp} (data, pipeline, tensor), for batches of"


def _mesh(ranks: int | None, dp: int | None, pp: int, tp: int) -> tuple[int, int]:
    """Return (ranks, dp): what is not given follows from the rest."""
    if dp is None:
        dp = (ranks or (4 if pp * tp == 1 else pp * tp)) // (pp * tp)
    if ranks not in (None, dp * pp * tp) or dp < 1:
        raise ValueError(
            f"--ranks {ranks} is not --dp {dp or 1} x --pp {pp} x --tp {tp}; leave --ranks out"
        )
    return dp * pp * tp, dp


def _verify(given) -> int:
    from minidist.tools import equivalence

    rows = []
    for row in equivalence.verify(given.strategy, transport=given.transport):
        rows.append(row)
        if not given.json:
            mark = "ok  " if row["ok"] else "FAIL"
            ranks = f"{row['ranks']} rank{'s' if row['ranks'] > 1 else ' '}"
            print(
                f"{mark} {row['strategy']:<13} {ranks}  {row['case']:<32} "
                f"{row['promise']:<16} {row['bytes']:>9,} bytes "
                f"(formula {row['bytes_formula']:,})  {row['detail']}",
                flush=True,
            )
    print(json.dumps(rows, indent=2) if given.json else _summary(rows))
    return 0 if all(row["ok"] for row in rows) else 1


def _summary(rows: list[dict]) -> str:
    failed = list(dict.fromkeys(row["strategy"] for row in rows if not row["ok"]))
    if failed:
        return (
            f"{sum(not row['ok'] for row in rows)} of {len(rows)} rows FAILED: {', '.join(failed)}"
        )
    largest = max(row["error"] for row in rows)
    return f"{len(rows)} rows, all ok; largest error {largest:.1e}, allowed {BOUND:.0e}"


def _bench(given) -> int:
    from minidist.tools.bench import comm, pipelines, steps

    suite = {"step": steps, "comm": comm, "pipeline": pipelines}[given.what]
    if not given.json:
        print(suite.HEAD, flush=True)
    rows = []
    try:
        for row in suite.measure(given.rounds):
            rows.append(row)
            if not given.json:
                print(suite.line(row), flush=True)
    finally:  # what was measured is not lost, whatever ended it
        if given.json:
            print(json.dumps(rows, indent=2))
    return 0
