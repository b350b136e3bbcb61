"""`minidist train --servers N`: its options, what does not go with them, and what it prints."""

import argparse
import time

import numpy as np

from minidist.cli.arguments import RANKS, STEPS, option_of, whole
from minidist.cli.presets import PRESETS
from minidist.comm import run as run_on_ranks
from minidist.data_parallel.server_plan import Plan
from minidist.kinds import model_of
from minidist.settings import Settings
from minidist.train import windows
from minidist.train_with_servers import replay, train_with_servers

OPTIONS = {  # of a Plan's fields
    "staleness": "staleness",
    "quorum": "quorum",
    "push_every": "n_push",
    "fetch_every": "n_fetch",
    "sparse": "sparse",
}
REMEDIES = {  # option: (its value if it is not given, why it does not go with servers)
    "dp": (None, "the workers share every batch; use --ranks"),
    "pp": (1, "every worker has all layers"),
    "cp": (1, "every worker has all positions"),
    "tp": (1, "every worker has whole matrices"),
    "ep": (1, "every worker has all experts"),
    "schedule": (None, "no worker has a pipeline"),
    "micro_batches": (None, "no worker has a pipeline"),
    "zero": (0, "the optimizer's state is the servers' already"),
    "precision": ("float32", "the servers update float32 weights"),
    "reconstruction": (0.0, "two translators are trained by ranks that sum their gradients"),
    "elastic": (False, "the weights of a server that dies are gone"),
    "resume": (False, "resume without servers, which read the same checkpoints"),
    "resume_from": (None, "resume without servers, which read the same checkpoints"),
    "every": (None, "a checkpoint is made at the end, when the weights are together again"),
}


def add_servers(parser: argparse.ArgumentParser) -> None:
    """Add the options of training with servers."""
    group = parser.add_argument_group("parameter servers")
    group.add_argument(
        "--servers", type=RANKS, help="ranks, the first ones, that keep the weights for the others"
    )
    group.add_argument(
        "--staleness",
        type=whole(1_000_000, "a run has no more minibatches", least=0),
        metavar="S",
        help="minibatches that a worker may be ahead of the slowest; 0: synchronous (default: any "
        "number). With --quorum: updates in a row that a worker may miss",
    )
    group.add_argument(
        "--quorum",
        type=RANKS,
        metavar="Q",
        help="workers that suffice for an update; late gradients stay in their worker's buffer",
    )
    group.add_argument(
        "--push-every", type=STEPS, metavar="N", help="minibatches whose gradients are sent as one"
    )
    group.add_argument(
        "--fetch-every", type=STEPS, metavar="N", help="minibatches from one pull to the next"
    )
    group.add_argument(
        "--sparse",
        action="store_true",
        help="push only rows that are not zero; the servers then use Adagrad, not AdamW",
    )
    group.add_argument(
        "--replay",
        action="store_true",
        help="then repeat the run on one rank, from the servers' logs, and compare every bit",
    )


def plan_of(given: argparse.Namespace) -> Plan | None:
    """Return what is asked for; None without servers. ValueError if options do not go together."""
    asked = {option: getattr(given, option) for option in OPTIONS}
    unasked = {"sparse": False}  # 0 is a staleness
    asked = {o: value for o, value in asked.items() if value is not unasked.get(o)}
    servers, by = _servers_of(given, [*asked, *["replay"] * given.replay])
    if servers is None:
        return None
    for option, (nothing, why) in REMEDIES.items():
        if getattr(given, option) not in (None, nothing):
            raise ValueError(
                f"{by} and {option_of(option)} do not go together: {why}; leave one of them out"
            )
    if given.data == "digits":
        raise ValueError(
            f"{by} and --data digits do not go together: batch norm needs the whole batch; "
            "leave --data out"
        )
    for option in ("push_every", "fetch_every"):
        for bound in ("staleness", "quorum"):
            if asked.get(option, 1) > 1 and bound in asked:
                raise ValueError(
                    f"{option_of(option)} {asked[option]} and {option_of(bound)} do not go "
                    "together: under a bound every minibatch pulls and pushes; leave one of "
                    "them out"
                )
    return Plan(servers, **{"staleness": None} | {OPTIONS[o]: v for o, v in asked.items()})


def _servers_of(given: argparse.Namespace, asked: list[str]) -> tuple[int | None, str]:
    """Return how many servers there are, and the option that asks for them.

    asked  options that say how servers are used: ValueError if there are none, or if they set a
           bound on workers that by --strategy wait for nobody
    """
    preset, by = PRESETS.get(given.strategy), f"--strategy {given.strategy}"
    if preset is None:
        for option in asked if given.servers is None else ():
            raise ValueError(f"{option_of(option)} says how servers are used; add --servers 1")
        return given.servers, "--servers"
    if not preset.servers:
        for option in ["servers"] * (given.servers is not None) + asked:
            raise ValueError(f"{by} has no servers; leave --strategy or {option_of(option)} out")
        return None, by
    for option in (each for each in asked if each in ("staleness", "quorum")):
        raise ValueError(
            f"{by} and {option_of(option)} do not go together: its workers wait for nobody; use "
            f"--servers {given.servers or preset.servers} in place of --strategy"
        )
    return given.servers or preset.servers, by


def serve(
    data, settings: Settings, plan: Plan, folder: str | None, repeat: bool, **where
) -> tuple[list[float], dict[str, np.ndarray], float]:
    """Train; return losses, weights and seconds; print how stale gradients were, and what was sent.

    repeat  also replay the run; RuntimeError if a bit differs
    where   transport, device and timeout of the ranks
    """
    begin, N = time.perf_counter(), settings.ranks
    ranks = run_on_ranks(train_with_servers, N, data, settings, plan, folder, **where)
    seconds = time.perf_counter() - begin
    servers, workers = ranks[: plan.servers], ranks[plan.servers :]
    stale = [updates for rank in servers for updates in rank.staleness]
    pulled, pushed = (sum(rank.sent for rank in those) / 1e6 for those in (servers, workers))
    print(
        f"pulled {pulled:.1f} MB, pushed {pushed:.1f} MB; "
        f"staleness {np.mean(stale):.2f} updates on average, {max(stale)} at most"
    )
    if repeat:
        logs, model = [rank.log for rank in servers], model_of(data, settings)
        given = model, windows(data, settings), settings, plan, logs
        want = run_on_ranks(replay, N, *given, **where)[0]
        if wrong := [n for n, w in want.items() if not np.array_equal(w, ranks[0].state[n])]:
            raise RuntimeError(f"the replay of the servers' logs has other bits in {wrong}")
        print(f"replay of the servers' logs: the same bits in all {len(want)} arrays")
    return ranks[0].losses, ranks[0].state, seconds


def who_has_what(plan: Plan) -> str:
    """Return the end of `4 ranks, ...` in words."""
    servers = f"{plan.servers} of them {'a server' if plan.servers == 1 else 'servers'}"
    return f"{servers}, the others each with a part of every batch of"
