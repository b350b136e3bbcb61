"""`minidist train`: train a small model on several ranks, then certify its gradients."""

import argparse
import time

import numpy as np

from minidist import nn
from minidist.backend import check_device
from minidist.checkpoint import Keep, manifest
from minidist.checkpoint.grow import DESCRIPTION, changes
from minidist.checkpoint.run_checkpoints import settings_in, steps_done_and_next
from minidist.cli.arguments import check_several
from minidist.cli.servers import plan_of, serve, servers_in_words
from minidist.cli.train_options import add_options, data_of, keep_of, settings_of
from minidist.comm import nccl
from minidist.comm import run as run_on_ranks
from minidist.comm.mpi import library as mpi
from minidist.data_parallel.parameter_server import ServerPlan
from minidist.dtypes import float_dtype
from minidist.errors import WrongInput, plural
from minidist.hybrid import check_whole_backward
from minidist.observe.style import save_loss_curve
from minidist.observe.timeline import FIGURES, check_path
from minidist.pipeline_parallel.schedules import programs
from minidist.training.elastic import train_elastic
from minidist.training.kinds import Data, kind_of, model_of
from minidist.training.loop import train, warm_up_and_decay
from minidist.training.progress import rows_of
from minidist.training.servers import workers_among
from minidist.training.settings import DEFAULTS, Settings
from minidist.training.setup import description, examples_of
from minidist.verify.certificate import certify
from minidist.verify.compare import BOUND

EXAMPLES = (
    "minidist train",
    "minidist train --pp 2 --tp 2 --micro-batches 8",
    "minidist train --data numbers --strategy tensor --checkpoint run --plot loss.png",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = (
        "Train a small character Transformer on real text, a convolutional network on images of "
        "digits, or a translator of numbers in words, with several worker processes that sum their "
        "gradients; then show that, on the trained weights, these gradients equal one device's."
    )
    add_options(parser)
    parser.set_defaults(run=run)


@np.errstate(all="ignore")  # the error of a loss or a weight that is not finite follows
def run(given: argparse.Namespace) -> int:
    """Train, show what the model does, certify; return 1 if the gradients are not one device's."""
    check_device(given.device)
    plan = plan_of(given)
    settings = settings_of(given, ranks_without_options(given))
    check_precision(given, settings)
    keep = keep_of(given)
    data = data_of(given, settings)
    check_before_ranks_start(given, data, settings, plan)
    first = _first_step(keep, description(data, settings), settings)
    model = model_of(data, settings)
    state, settings = _train(given, settings, data, model, keep, first, plan)
    model.load_state(state)
    print(kind_of(data).outcome(model, data, given.sample, settings.seed), end="")
    return _certified(given, model, data, settings, 0 if plan is None else plan.servers)


def ranks_without_options(given: argparse.Namespace) -> int:
    """Return the number of ranks if no option says it: 4, or all processes of MPI."""
    if given.transport != "mpi":
        return 4
    processes = mpi.processes()
    if not (given.ranks or given.dp):
        check_several(processes)
    return processes


def check_precision(given: argparse.Namespace, settings: Settings) -> None:
    """Raise ValueError unless there are such numbers, on this device, and such programs."""
    order = programs(settings.schedule, settings.pp, settings.micro_batches)
    check_whole_backward(order, settings.zero)
    float_dtype(settings.dtype)
    if settings.dtype == "bfloat16" and given.device != "cpu":
        raise WrongInput("bfloat16 is NumPy's and ml_dtypes', not CuPy's; use --precision float16")


def check_before_ranks_start(
    given: argparse.Namespace, data: Data, settings: Settings, plan: ServerPlan | None
) -> None:
    """Raise here, once, what every rank would raise."""
    examples_of(data, settings)
    if given.log is not None:
        rows_of(given.log)
    if given.plot is not None:
        check_path(given.plot, "a plot", FIGURES)
    if plan is not None:
        workers_among(settings.ranks, settings, plan)
    if given.transport == "nccl":
        nccl.check_ranks(settings.ranks, given.device)


def _first_step(keep: Keep | None, run: dict, settings: Settings) -> int:
    """Return the step that the run begins with; print what it goes on from, once it is read."""
    saved = keep and keep.saved(run, DEFAULTS)
    if not saved:
        return 0
    grows = changes(saved.about[DESCRIPTION], run)
    _, first = steps_done_and_next(saved, grows)
    saved.check()
    over = [] if first < settings.steps else [f"no update is left of --steps {settings.steps}"]
    rate = [] if grows or over else rate_in_words(settings_in(saved, DEFAULTS), settings, first)
    newer = [str(n) for n in manifest.whole_ones(saved.path.parent) if n > saved.step]
    aside = [f"newer ones ({', '.join(newer)}) are renamed to aside-*"] if newer else []
    begin = f"goes on after step {saved.step}, from {saved.path}"
    print("; ".join([begin, *aside, *grows, *over, *rate]))
    return first


def rate_in_words(before: dict, settings: Settings, first: int) -> list[str]:
    """Return in words how the learning rate jumps where a run goes on with another --steps."""
    if before["steps"] == settings.steps:
        return []
    last = before["lr"] * warm_up_and_decay(first - 1, before["steps"])
    rate = settings.lr * warm_up_and_decay(first, settings.steps)
    by = f"--steps {settings.steps}, not {before['steps']}"
    return [f"{by}: the learning rate goes on with {rate:.1e}, after {last:.1e}"]


def _train(
    given: argparse.Namespace,
    settings: Settings,
    data: Data,
    model: nn.Module,
    keep: Keep | None,
    first: int,
    plan: ServerPlan | None,
) -> tuple[dict, Settings]:
    """Train on the ranks, print what goes in and how far it comes; return weights and mesh."""
    size = sum(p.size for p in model.parameters() if p.requires_grad)
    kind, ranks = kind_of(data), settings.ranks
    who = mesh_in_words(settings) if plan is None else servers_in_words(plan)
    print(
        f"{kind.description(data)['source']}: {kind.size(data)}; {size:,} parameters\n"
        f"{plural(ranks, 'rank')}, {who} {settings.batch} {kind.unit}",
        flush=True,
    )
    begin = time.perf_counter()
    where = {"device": given.device, "timeout": given.timeout}
    if given.elastic and keep is not None:
        losses, state, settings = train_elastic(data, settings, keep, log=given.log, **where)
    elif plan is not None:
        where["transport"] = given.transport
        kept = given.checkpoint, given.log
        losses, state, seconds = serve(data, settings, plan, kept, given.replay, **where)
    else:
        where["transport"] = given.transport
        losses, state = run_on_ranks(train, ranks, data, settings, keep, given.log, **where)[0]
    mean = sum(losses[-20:]) / len(losses[-20:])
    seconds = time.perf_counter() - begin if plan is None else seconds
    print(
        f"{plural(len(losses) - first, 'step')} in {seconds:.0f} s: "
        f"loss {losses[0]:.3f} -> {mean:.3f} nats/{kind.target(data)}"
    )
    print(kind.remark(data, mean), end="")
    if given.plot is not None and (given.transport != "mpi" or mpi.is_first()):
        done = () if plan is not None else range(first, len(losses))
        rates = [settings.lr * warm_up_and_decay(step, settings.steps) for step in done]
        title = kind.description(data)["source"]
        save_loss_curve(given.plot, losses, rates, kind.target(data), title)
        print(f"loss and learning rate: {given.plot}")
    return state, settings


def mesh_in_words(settings: Settings) -> str:
    """Return the words between `4 ranks, ` and the size of a batch."""
    if not settings.on_mesh:
        return "each with its part of every batch of"
    axes = {"data": settings.dp, "pipeline": settings.pp}
    if settings.cp > 1:
        axes["context"] = settings.cp
    axes["tensor"] = settings.tp
    words = [f"{' x '.join(map(str, axes.values()))} ({', '.join(axes)})"]
    if settings.ep > 1:
        words.append(f"experts over {settings.ep}")
    if settings.zero:
        words.append(f"ZeRO stage {settings.zero}")
    return ", ".join([*words, "for batches of"])


def _certified(
    given: argparse.Namespace, model: nn.Module, data: Data, settings: Settings, servers: int
) -> int:
    """Print the certificate of the trained weights; return 0 if it is good, else 1."""
    row = certify(model, data, settings, given.transport, given.device, servers)
    against = (
        "against one device" if given.device == "cpu" else f"on {given.device} against the host"
    )
    print(
        f"certificate: {'ok' if row['ok'] else 'FAILED'}. {plural(settings.ranks, 'rank')} "
        f"{against}, in float64, {row['case']}:\n"
        f"  largest gradient difference {row['difference']:.1e}; {row['detail']}; "
        f"allowed {BOUND:.0e}"
    )
    return 0 if row["ok"] else 1
