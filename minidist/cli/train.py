"""`minidist train`: train a small model on several ranks, then certify its gradients."""

import argparse
import time

from minidist import nn
from minidist.backend import check_device, float_dtype
from minidist.checkpoint import Keep, Saved, manifest
from minidist.checkpoint.grow import changes
from minidist.checkpoint.training import place
from minidist.cli.arguments import check_several
from minidist.cli.outcomes import outcome, sizes, target
from minidist.cli.servers import plan_of, serve, who_has_what
from minidist.cli.train_options import OF_NUMBERS, add_options, settings_of
from minidist.comm import mpi, nccl
from minidist.comm import run as run_on_ranks
from minidist.data_parallel.server_plan import Plan
from minidist.datasets import Text, digit_images, numbers, text
from minidist.elastic import train_elastic
from minidist.kinds import KINDS, Data, kind_of, model_of
from minidist.pipeline_parallel.schedules import programs
from minidist.settings import Settings
from minidist.tools.certificate import certify
from minidist.tools.compare import BOUND
from minidist.train import told, train, windows
from minidist.train_with_servers import workers_among


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = (
        "Train a small character Transformer on real text, a convolutional network on images of "
        "digits, or a translator of numbers in words, with several worker processes that sum their "
        "gradients; then show that, on the trained weights, these gradients equal one device's."
    )
    add_options(parser)
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
    keep = _keep(given)
    data = _data(given, settings)
    windows(data, settings)  # likewise
    if plan is not None:
        workers_among(settings.ranks, settings, plan)  # likewise
    if given.transport == "nccl":
        nccl.check_ranks(settings.ranks, given.device)
    first = _first_step(keep, told(data, settings), settings.steps)
    model = model_of(data, settings)
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
    if _resumes(given):  # the model has its characters
        saved = Saved.newest(given.checkpoint, given.resume_from)
        before = saved.about.get("told", {}).get("data", {})
        corpus = corpus.including(before.get("characters", ""))
    return corpus


def _resumes(given) -> bool:
    return given.resume or given.resume_from is not None


def _keep(given) -> Keep | None:
    if given.checkpoint is None and _resumes(given):
        option = "--resume" if given.resume else "--resume-from"
        raise ValueError(f"{option} needs --checkpoint FOLDER, where the checkpoints are")
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
    return Keep(given.checkpoint, given.every or Keep.every, _resumes(given), given.resume_from)


def _first_step(keep: Keep | None, run: dict, steps: int) -> int:
    """Return the step that the run begins with; print what it goes on from, once it is read."""
    saved = keep and keep.saved(run)
    if not saved:
        return 0
    grows = changes(saved.about["told"], run)
    first = place(saved, grows)[1]
    saved.check()
    over = [] if first < steps else [f"no update is left of --steps {steps}"]
    newer = [str(n) for n in manifest.whole_ones(saved.path.parent) if n > saved.step]
    aside = [f"newer ones ({', '.join(newer)}) are renamed to aside-*"] if newer else []
    begin = f"goes on after step {saved.step}, from {saved.path}"
    print("; ".join([begin, *aside, *grows, *over]))
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
