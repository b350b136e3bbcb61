"""`minidist train --servers N`: its options, what does not go with them, and what it prints."""

import argparse
import time

import numpy as np

from minidist import nn
from minidist.cli.arguments import RANKS, STEPS, add_flag, add_option, option_of, whole
from minidist.cli.presets import PRESETS
from minidist.comm import Group
from minidist.comm import run as run_on_ranks
from minidist.data_parallel.parameter_server import Push, ServerPlan
from minidist.errors import WrongInput
from minidist.training.kinds import KINDS, Data, model_of
from minidist.training.servers import Minibatches, rule, train_with_servers, workers_among
from minidist.training.settings import Settings
from minidist.training.setup import examples_of
from minidist.verify.replays.parameter_server import replay_server

OPTIONS = {  # of a ServerPlan's fields
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
    "optimizer": ("adamw", "a server has a slice of each matrix, and Muon needs all of it"),
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
    words = "ranks, the first ones, that keep the weights for the others"
    add_option(group, "--servers", words, RANKS)
    words = "minibatches that a worker may be ahead of the slowest; 0: synchronous (default: any "
    words += "number). With --quorum: updates in a row that a worker may miss"
    minibatches = whole(1_000_000, "a run has no more minibatches", least=0)
    add_option(group, "--staleness", words, minibatches, "S")
    words = "workers that suffice for an update; late gradients stay in their worker's buffer"
    add_option(group, "--quorum", words, RANKS, "Q")
    add_option(group, "--push-every", "minibatches whose gradients are sent as one", STEPS, "N")
    add_option(group, "--fetch-every", "minibatches from one pull to the next", STEPS, "N")
    words = "push only rows that are not zero; the servers then use Adagrad, not AdamW"
    add_flag(group, "--sparse", words)
    words = "then repeat the run on one rank, from the servers' logs, and compare every bit"
    add_flag(group, "--replay", words)


def plan_of(given: argparse.Namespace) -> ServerPlan | None:
    """Return what is asked for; None without servers. ValueError if options do not go together."""
    asked = {option: getattr(given, option) for option in OPTIONS}
    unasked = {"sparse": False}  # 0 is a staleness
    asked = {o: value for o, value in asked.items() if value is not unasked.get(o)}
    servers, by = _servers_of(given, [*asked, "replay"] if given.replay else list(asked))
    if servers is None:
        return None
    for option, (nothing, why) in REMEDIES.items():
        if getattr(given, option) not in (None, nothing):
            raise WrongInput(
                f"{by} and {option_of(option)} do not go together: {why}; leave one of them out"
            )
    if why := KINDS[given.data].needs_all_ranks:
        raise WrongInput(
            f"{by} and --data {given.data} do not go together: {why}; leave --data out"
        )
    for option in ("push_every", "fetch_every"):
        for bound in ("staleness", "quorum"):
            if asked.get(option, 1) > 1 and bound in asked:
                raise WrongInput(
                    f"{option_of(option)} {asked[option]} and {option_of(bound)} do not go "
                    "together: under a bound every minibatch pulls and pushes; leave one of "
                    "them out"
                )
    return ServerPlan(servers, **{"staleness": None} | {OPTIONS[o]: v for o, v in asked.items()})


def _servers_of(given: argparse.Namespace, asked: list[str]) -> tuple[int | None, str]:
    """Return how many servers there are, and the option that asks for them.

    asked  options that say how servers are used: ValueError if there are none, or if they set a
           bound on workers that by --strategy wait for nobody
    """
    preset, by = PRESETS.get(given.strategy), f"--strategy {given.strategy}"
    if preset is None:
        if asked and given.servers is None:
            raise WrongInput(f"{option_of(asked[0])} says how servers are used; add --servers 1")
        return given.servers, "--servers"
    if not preset.servers:
        if given.servers is not None:
            asked = ["servers", *asked]
        if asked:
            raise WrongInput(f"{by} has no servers; leave --strategy or {option_of(asked[0])} out")
        return None, by
    if bounds := [option for option in asked if option in ("staleness", "quorum")]:
        raise WrongInput(
            f"{by} and {option_of(bounds[0])} do not go together: its workers wait for nobody; use "
            f"--servers {given.servers or preset.servers} in place of --strategy"
        )
    return given.servers or preset.servers, by


def serve(
    data: Data, settings: Settings, plan: ServerPlan, kept: tuple, repeat: bool, **where
) -> tuple[list[float], dict[str, np.ndarray], float]:
    """Train; return losses, weights and seconds; print how stale gradients were, and what was sent.

    kept    the folder of the checkpoint and the file of the log, or None
    repeat  also replay the run; RuntimeError if a bit differs
    where   transport, device and timeout of the ranks
    """
    begin, N = time.perf_counter(), settings.ranks
    ranks = run_on_ranks(train_with_servers, N, data, settings, plan, *kept, **where)
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
        examples = examples_of(data, settings)
        want = run_on_ranks(replay, N, model, examples, settings, plan, logs, **where)[0]
        if wrong := [n for n, w in want.items() if not np.array_equal(w, ranks[0].state[n])]:
            raise RuntimeError(f"the replay of the servers' logs has other bits in {wrong}")
        print(f"replay of the servers' logs: the same bits in all {len(want)} arrays")
    return ranks[0].losses, ranks[0].state, seconds


def servers_in_words(plan: ServerPlan) -> str:
    """Return the end of `4 ranks, ...` in words."""
    servers = f"{plan.servers} of them {'a server' if plan.servers == 1 else 'servers'}"
    return f"{servers}, the others each with a part of every batch of"


def replay(
    group: Group,
    model: nn.Module,
    examples: tuple[np.ndarray, np.ndarray],
    settings: Settings,
    plan: ServerPlan,
    logs: list[list[list[Push]]],
) -> dict[str, np.ndarray] | None:
    """Return, on rank 0, the weights after the updates in the servers' logs, from the model's.

    Run it on as many ranks as trained. ValueError if a minibatch is not in each log exactly once.
    """
    if group.rank > 0:
        return None  # it only takes its share of the cores
    workers = workers_among(group.size, settings, plan)
    minibatches = Minibatches(*examples, settings, workers)
    dealt = {plan.servers + w: list(minibatches.of(w)) for w in range(workers)}
    optimizer = rule(settings, plan, workers)
    model = model.to(group.device)
    return replay_server(model, plan, logs, dealt, minibatches.backward, optimizer)
