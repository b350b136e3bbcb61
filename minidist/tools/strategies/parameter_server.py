"""Parameter servers: the first ranks serve, the others compute."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby

import numpy as np

from minidist import nn, optim
from minidist.autograd import Tensor
from minidist.comm import Group
from minidist.data_parallel.parameter_server import Plan, Push, Server, Worker, join, train
from minidist.datasets import shard
from minidist.errors import check_options
from minidist.planning.costs import parameter_server as costs
from minidist.planning.costs.cost import Cost
from minidist.rng import Randomness
from minidist.tools.causes import cause_of
from minidist.tools.costs.watch import Watch, adamw
from minidist.tools.replay_server import replay_server
from minidist.tools.strategies.cases import (
    INPUT,
    Case,
    Outcome,
    Split,
    as_input,
    collect,
    randomness_of,
    small_cases,
    transformer_example,
)
from minidist.tools.strategies.pipedream import momentum, stream_cases, twice
from minidist.tools.strategies.record import Costs, Strategy


def servers_among(ranks: int) -> int:
    """Return how many of these ranks serve: two if at least two are left to work, else one."""
    if ranks < 2:
        raise ValueError(f"a server and a worker need 2 ranks, not {ranks}; use 2 or more")
    return 1 if ranks < 4 else 2


def parameter_server_worker(group: Group, case: Case, servers: int | None = None) -> Outcome:
    """Run one clock of synchronous servers; every worker has a share of the batch."""
    servers = servers or servers_among(group.size)
    examples, workers = np.arange(len(case.inputs)), range(servers, group.size)
    dealt = {w: shard(examples, w - servers, len(workers)) for w in workers}
    return _one_clock(group, case, Plan(servers), dealt)


def stale_worker(
    group: Group, case: Case, plan: Plan, minibatches: int | None = None, **options
) -> Outcome:
    """Train on a stream of minibatches and replay it; by default, one minibatch's gradient.

    With `minibatches` the batch is cut into that many minibatches, dealt to the workers in turn,
    and the outcome is the weights at the end.
    """
    servers = servers_among(group.size)
    check_options(Plan, options, "a plan", without=["servers"])
    plan = replace(plan, servers=servers, **options)
    if not minibatches:
        return _one_clock(group, case, plan, {servers: np.arange(len(case.inputs))})
    cut = np.array_split(np.arange(len(case.inputs)), minibatches)
    dealt = {w: list(mine) for w, mine in zip(*_deal(minibatches, group.size), strict=True)}
    model, backward = copy.deepcopy(case.model), partial(_minibatch, case, cut)
    role = train(join(group, model, momentum, plan), backward, dealt.get(group.rank, []))
    logs, want = _everyones_logs(group, role), None
    if group.rank == 0:
        want = replay_server(case.model, plan, logs, dealt, backward, momentum)
    said = None
    if want is not None and any(not np.array_equal(model.state()[n], w) for n, w in want.items()):
        said = cause_of.replays(model.state(), _others(case, plan, logs, dealt, backward))
    return Outcome(model.state(), role.group.ledger.bytes["send"], want, said=said)


def _others(case: Case, plan: Plan, logs, dealt: dict[int, list], backward: Callable) -> dict:
    """Return {what is different about it: a replay that is not the one that should be}."""

    def shifted(by: int) -> list:
        def moved(push: Push) -> Push:
            return replace(push, versions=tuple(v + by for v in push.versions))

        return [[[moved(push) for push in update] for update in log] for log in logs]

    def with_all_before() -> Callable:
        owner = {batch: w for w, mine in dealt.items() for batch in mine}
        sums: dict[tuple, np.ndarray] = {}

        def accumulate(model: nn.Module, batch: int) -> None:
            backward(model, batch)
            for p in model.parameters():
                key = owner[batch], p.name
                sums[key] = p.grad = p.grad + sums[key] if key in sums else p.grad.copy()

        return accumulate

    def other(logs=logs, backward=backward, optimizer=momentum, **more) -> dict:
        return replay_server(case.model, plan, logs, dealt, backward, optimizer, **more)

    return {
        "with versions -1 of those recorded": lambda: other(shifted(-1)),
        "with versions +1 of those recorded": lambda: other(shifted(1)),
        "that updates twice": lambda: other(optimizer=twice),
        "in which a push has all that its worker has sent": lambda: other(
            backward=with_all_before()
        ),
        "in which a push has its last gradient alone: a buffer that forgets": lambda: other(
            kept=slice(-1, None)
        ),
    }


def _workers(ranks: int) -> range:
    return range(servers_among(ranks), ranks)


def _deal(minibatches: int, ranks: int) -> tuple[range, list[range]]:
    workers = _workers(ranks)
    return workers, [range(k, minibatches, len(workers)) for k in range(len(workers))]


def _minibatch(case: Case, cut: list[np.ndarray], model: nn.Module, batch: int) -> None:
    """Compute the gradient of one minibatch, the mean over its own targets."""
    rows = cut[batch]
    logits = model(case.inputs[rows], Randomness(case.seed, batch, rows))
    case.loss(logits, case.targets[rows]).backward()


def _one_clock(group: Group, case: Case, plan: Plan, dealt: dict[int, np.ndarray]) -> Outcome:
    """Let each worker push the gradient of its examples at version 0; return what servers got."""
    model, mine = copy.deepcopy(case.model), dealt.get(group.rank)
    pieces = [as_input(case.inputs[:0] if mine is None else case.inputs[mine])]

    def backward(model: nn.Module, batch: int) -> None:
        logits = model(pieces[0], randomness_of(case, mine))
        case.loss(logits, case.targets[mine], reduction_size=case.total).backward()

    nothing = partial(optim.SGD, lr=0.0)
    role = train(join(group, model, nothing, plan), backward, [] if mine is None else [0])
    moved = role.group.ledger.bytes["send"]
    slices = role.slice.grad if isinstance(role, Server) else role.buffer[:0]
    flat = role.flat.views(group.all_gather(slices))
    result = collect(model)  # zeros of what is frozen, and running statistics
    result |= {p.name: g for p, g in zip(role.flat.parameters, flat, strict=True)}
    if isinstance(pieces[0], Tensor):
        (x,) = pieces
        result[INPUT] = group.all_gather(np.zeros_like(x.data) if x.grad is None else x.grad)
    return Outcome(result, moved)


def _everyones_logs(group: Group, role: Server | Worker) -> list[list[list[Push]]]:
    """Return the servers' logs, on every rank; they are sent as a row per gradient."""
    rows = [
        (update, push.worker, batch, version)
        for update, pushes in enumerate(role.log if isinstance(role, Server) else [])
        for push in pushes
        for batch, version in zip(push.batches, push.versions, strict=True)
    ]
    counts = group.all_gather(np.array([len(rows)]))[: role.plan.servers]
    table, logs = group.all_gather(np.array(rows, np.int64).reshape(-1, 4)).tolist(), []
    for stop, count in zip(np.cumsum(counts), counts, strict=True):
        log: list[list[Push]] = []
        for (update, worker), own in groupby(table[stop - count : stop], lambda row: row[:2]):
            log += [[]] if update == len(log) else []
            _, _, batches, versions = zip(*own, strict=True)
            log[-1].append(Push(worker, batches, versions))
        logs.append(log)
    return logs


def clock_bytes(case: Case, ranks: int) -> int:
    """Return P per pull and per push of every worker, and headers."""
    servers = case.options.get("servers", servers_among(ranks))
    return costs.clocks_bytes(case, servers, [1] * (ranks - servers))


def stale_bytes(case: Case, ranks: int) -> int:
    """Return P per pull and per push of every minibatch, and headers."""
    minibatches = case.options.get("minibatches", 1)
    every = {key: case.options.get(key, 1) for key in ("n_fetch", "n_push")}
    steps = [len(mine) for mine in _deal(minibatches, ranks)[1]]
    return costs.clocks_bytes(case, servers_among(ranks), steps, **every)


def by_workers(case: Case, ranks: int) -> Split:
    return Split(data=len(_workers(ranks)))


def downpour_cases(ranks: int) -> list[Case]:
    """Streams, one minibatch, and a stream with rare pulls and pushes and local steps."""
    cases = stream_cases(ranks)
    rare = {"minibatches": 11, "n_fetch": 2, "n_push": 3, "local_lr": 0.05}
    return [*cases, replace(cases[0], name="MLP, n_fetch 2, n_push 3", options=rare)]


def one_minibatch_each(ranks: int) -> Case:
    """Return the example, with a minibatch for every worker."""
    return transformer_example(ranks, minibatches=len(_workers(ranks)))


def server_step(group: Group, case: Case, watch: Watch, plan: Plan) -> None:
    """One step with AdamW, watched: every worker does one minibatch, its share of the batch."""
    servers = servers_among(group.size)
    batches = np.array_split(np.arange(len(case.inputs)), group.size - servers)

    def backward(model: nn.Module, batch: int) -> None:
        rows, weights = batches[batch], [p.data for p in model.parameters()]
        y = case.loss(model(case.inputs[rows]), case.targets[rows])
        watch.graph(y, parameters=weights).backward()

    role = join(group, case.model, adamw, replace(plan, servers=servers))
    watch.model(case.model)
    train(role, backward, [group.rank - servers])
    watch.sent = role.group.ledger.bytes["send"]  # not the last weights, gathered at the end
    if isinstance(role, Server):
        watch.holds([role.flat, role.slice.home], role.optimizer)
    else:
        watch.holds([role.flat], gradients=[role.buffer])


def server_costs(case: Case, ranks: int) -> list[Cost]:
    return costs.parameter_server_costs(case, ranks, servers_among(ranks))


def server_limit(case: Case, ranks: int) -> tuple[int, str]:
    """Asynchronous workers may have separate minibatches; stale gradients limit them."""
    return len(case.inputs) + servers_among(ranks), "examples and servers"


def _costs(nbytes: Callable, plan: Plan, **more) -> Costs:
    step = partial(server_step, plan=plan)
    return Costs(nbytes, server_costs, step, server_limit, "servers", **more)


def _stale(staleness: int | None, **words) -> Strategy:
    plan = Plan(staleness=staleness)
    return Strategy(
        family="parameter server",
        worker=partial(stale_worker, plan=plan),
        promise="replayed bitwise",
        costs=_costs(stale_bytes, plan, example=one_minibatch_each),
        **COMMON | words,
    )


COMMON = {
    "lesson": "04_parameter_server",
    "ranks": (2, 3, 4),
    "tests": ("data_parallel/test_parameter_server.py", "data_parallel/test_sparse_update.py"),
}
STRATEGIES = [
    Strategy(
        name="parameter_server",
        idea="weights on servers, synchronous",
        term="参数服务器, 同步",
        paper="Ho et al. 2013, section 2 (staleness 0)",
        family="parameter server",
        files=("data_parallel/parameter_server.py",),
        worker=parameter_server_worker,
        promise="exact",
        cases=small_cases,
        costs=_costs(clock_bytes, Plan()),
        split=by_workers,
        **COMMON,
    ),
    _stale(
        None,
        name="downpour",
        idea="asynchronous, with rare pulls and pushes; sparse pushes",
        term="参数服务器, 异步; 稀疏更新",
        paper="Dean et al. 2012, section 4.1; Li et al. 2014, section 3.2 (sparse pushes)",
        files=("data_parallel/parameter_server.py", "data_parallel/sparse_update.py"),
        cases=downpour_cases,
    ),
    _stale(
        1,
        name="ssp",
        idea="bounded staleness; and, our own, a quorum with a buffer for late gradients",
        term="半同步, 延迟缓冲区",
        paper="Ho et al. 2013, section 2",
        files=("data_parallel/parameter_server.py", "data_parallel/server_plan.py"),
        cases=stream_cases,
    ),
]
