"""Check one statement: the gradient on many ranks equals the gradient of a single device.

    certify("zero_1")                             a strategy of the package, on its own cases
    certify(reduce)                               reduce(model, group): leave the sum in p.grad
    certify(reduce, replay=f)                     f([each rank's gradients]) -> what is promised
    certify(worker)                               worker(group, model, x, y) -> {name: gradient}
    certify(make, trainer=True)                   make(model, group) -> what has backward(batch)
    certify(partial(Pipeline, schedule="1f1b", micro_batches=4))    a class: it makes a trainer

Whatever it is runs on real ranks, in float64 (outcomes.py). Then `row` compares, on every rank, all
parameters that are trained, and what else a rank returns: with one device's gradient (compare.py
has the bound), or, bit for bit, with a replay, or as two sides of an identity. What a reader has
written trains on a model of the reader's or on four of the package, whose batches do not divide by
the ranks, with dropout, padding, tied weights and experts; and on two batches in a row, the second
with other targets. The weights may not change.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from minidist import nn
from minidist.backend import as_array
from minidist.comm import Cluster
from minidist.comm.communicator import BY_FORMULA
from minidist.comm.local import worker as by_value
from minidist.errors import RankFailed, WrongInput, check_name, is_wrong_input, nearest, plural
from minidist.parallel import norms_that_train
from minidist.pipeline_parallel.actions import Programs
from minidist.pipeline_parallel.schedules import order_of
from minidist.verify import outcomes
from minidist.verify.causes.finding import Finding, some
from minidist.verify.causes.reasons import UNKNOWN, reasons
from minidist.verify.causes.rerun import known
from minidist.verify.compare import BOUND, compare, in_one_line
from minidist.verify.outcomes import Gradients, Outcome, named_arrays, same
from minidist.verify.strategies import STRATEGIES, Case, Strategy, one_device
from minidist.verify.strategies.cases import readers_case, small_cases, trained
from minidist.verify.strategies.pipeline_parallel import cases_of

SIZES = 1, 2, 3, 4, 8  # numbers of ranks that `verify` tries
REORDERED = ", up to the order of sums, 1e-9"  # of BOUND: ends a promise of bits
Replay = Callable[[list[Gradients]], Gradients]
Identity = Callable[[list[Gradients], list[Gradients]], tuple[Gradients, Gradients]]


@dataclass(frozen=True)
class Promise:
    """What gradients have to be.

    name   in a row: "exact", "replayed bitwise", ...
    kind   "exact", "replay", "identity", or "" for a strategy of the package: see `reasons`
    bound  of errors
    """

    name: str
    want: Gradients
    kind: str = ""
    bound: float = BOUND


def row(case: Case, ranks: list[Outcome], promise: Promise, got: list[Gradients]) -> dict:
    """Return of a row: promise, error, difference, bytes, ok, and detail, a list."""
    comparison, faults = compare(got, promise.want, promise.bound), _faults(ranks)
    detail = [str(comparison), *faults] if not (comparison.ok and faults) else faults
    if not comparison.ok and (kind := ranks[0].returned):
        detail.append(f"it returned a {kind}; it has to leave the sums in p.grad")
    elif not comparison.ok and ranks[0].reference is not None:
        detail += [ranks[0].message] if ranks[0].message else []
    elif not comparison.ok:
        detail += reasons(Finding(got, promise.want, case, len(ranks), promise.kind))
    return {
        "promise": promise.name,
        "error": np.inf if faults else comparison.error,
        "difference": comparison.difference,
        "bytes": sum(rank.bytes for rank in ranks),
        "bytes_formula": None,
        "ok": comparison.ok and not faults,
        "detail": detail,
    }


def _faults(ranks: list[Outcome]) -> list[str]:
    """Return in words which elements no rank has, and which weights are other ones than before."""
    nowhere = {name: ~np.any([r.held[name] for r in ranks], axis=0) for name in ranks[0].held}
    missing = [f"{n.sum()} elements of {name}" for name, n in nowhere.items() if n.any()]
    changed = list(dict.fromkeys(name for rank in ranks for name in rank.changed))
    faults = [f"no rank has {some(missing)}"] if missing else []
    if changed:
        faults.append(f"only an optimizer may change the weights, not {some(changed)}")
    return faults


# Strategies of the package.


def strategies() -> list[str]:
    return list(STRATEGIES)


def find(name: str) -> Strategy:
    check_name("strategy", name, STRATEGIES)
    return STRATEGIES[name]


def check(
    strategy: str,
    case: Case,
    size: int,
    cluster: Cluster | None = None,
    transport: str = "process",
    device: str = "cpu",
    rerun: bool = True,
    **options,
) -> dict:
    """Run one case on `size` ranks; return its row, as a dictionary. Options as in `gradients`.

    It holds strategy, case, ranks, promise, error, difference, bytes, operations, bytes_formula,
    ok, detail. `operations` has the bytes of each; `bytes_formula` what a paper says, or None.
    Where a library, MPI or NCCL, has added up in an order of its own, a promise of bits is one of
    the bound, and the row's promise says so.

    rerun  whether wrong gradients are compared with those of the register's mistakes (causes/)
    """
    entry, case = find(strategy), replace(case, options=case.options | options)
    return row_of(entry, case, _run(entry, case, size, cluster, transport, device), rerun)


def row_of(entry: Strategy, case: Case, ranks: list[Outcome], search: bool) -> dict:
    """Return the row of what a strategy has on its ranks; search: as `rerun` of `check`."""
    moved = sum(rank.bytes for rank in ranks)
    # No paper's formula has the statistics of batch norms that train.
    known_bytes = None if norms_that_train(case.model) else entry.costs.bytes
    formula = known_bytes(case, len(ranks)) if known_bytes else None
    operations = sum((Counter(rank.operations) for rank in ranks), start=Counter())
    got = [rank.gradients for rank in ranks]
    compared = row(case, ranks, promise_of(entry, case, ranks), got)
    detail = [part for part in compared["detail"] if part != UNKNOWN]
    if search and not compared["ok"] and (len(detail) == 1 or UNKNOWN in compared["detail"]):
        detail += filter(None, [known(entry.name, case, got)])
    right_bytes = formula in (None, moved)
    if not right_bytes:
        parts = ", ".join(f"{operation} {n}" for operation, n in operations.items())
        detail.append(f"{moved} bytes moved, not {formula}" + (f" ({parts})" if parts else ""))
    if computed := [operation for operation in operations if operation.endswith(BY_FORMULA)]:
        detail.append(f"not counted: {', '.join(computed)}")
    return (
        {"strategy": entry.name, "case": case.name, "ranks": len(ranks)}
        | compared
        | {
            "bytes_formula": formula,
            "operations": dict(operations),
            "ok": compared["ok"] and right_bytes,
            "detail": "; ".join(detail),
        }
    )


def promise_of(entry: Strategy, case: Case, ranks: list[Outcome]) -> Promise:
    """Return a strategy's promise of a case: one device's gradients, or a replay's."""
    reference = ranks[0].reference
    if reference is None or entry.promise == "exact":
        return Promise("exact", one_device(case) if reference is None else reference)
    if any(rank.reordered for rank in ranks):
        return Promise(entry.promise + REORDERED, reference)
    return Promise(entry.promise, reference, bound=0.0)


def _run(
    entry: Strategy, case: Case, size: int, cluster: Cluster | None, transport: str, device: str
) -> list[Outcome]:
    """Run a strategy on ranks, old or new; ValueError where it cannot split the case."""
    if cluster is not None and cluster.size != size:
        raise WrongInput(f"the cluster has {cluster.size} ranks, not {size}")
    entry.check(case, size)
    with nullcontext(cluster) if cluster else Cluster(size, transport, device) as ranks:
        try:
            return ranks.run(partial(worker_of(entry), **case.options), case)
        except RankFailed as failed:
            if is_wrong_input(failed):
                raise WrongInput(str(failed.__cause__)) from failed
            raise


def worker_of(entry: Strategy) -> Callable[..., Outcome]:
    """Return the function (group, case, **options) of a strategy's ranks."""
    return entry.worker or partial(outcomes.of_job, entry.start)


def gradients(
    strategy: str,
    model: nn.Module,
    inputs: np.ndarray,
    targets: np.ndarray,
    size: int,
    loss: Callable | None = None,
    transport: str = "process",
    cluster: Cluster | None = None,
    device: str = "cpu",
    **options,
) -> dict[str, np.ndarray]:
    """Return {global name: gradient} after one batch under `strategy` on `size` real ranks.

    The ranks start from the weights of `model`, a single-device model, which does not change.
    ValueError if the results of two ranks differ by more than the bound. `cluster`: running ranks
    to use instead of new ones. `device`: where new ranks have the model and all arrays.
    """
    entry = find(strategy)
    x, y = as_array(inputs), as_array(targets)
    case = Case("given", model, x, y, loss or model.loss, options=options)
    got = [rank.gradients for rank in _run(entry, case, size, cluster, transport, device)]
    agreement = compare(got, got[0])
    if not agreement.ok:
        raise WrongInput(f"the ranks do not agree with rank 0: {agreement}")
    return {name: got[0][name] for name in model.named_parameters()}


def verify(
    names: list[str] | None = None,
    sizes: Iterable[int] = SIZES,
    transport: str = "process",
    device: str = "cpu",
) -> Iterator[dict]:
    """Yield `check`'s row per number of ranks, strategy (None: all) and case."""
    entries = _entries(names)
    red: set[str] = set()  # the register's mistakes run for the first red row of a strategy
    for size in sizes:
        with Cluster(size, transport, device) as cluster:
            for entry in (entry for entry in entries if size in entry.ranks):
                for case in entry.cases(size):
                    checked = check(entry.name, case, size, cluster, rerun=entry.name not in red)
                    if not checked["ok"]:
                        red.add(entry.name)
                    yield checked


def number_of_cases(names: list[str] | None, size: int) -> int:
    """Return the number of rows that `verify` has for these strategies on this many ranks."""
    return sum(len(entry.cases(size)) for entry in _entries(names) if size in entry.ranks)


def _entries(names: list[str] | None) -> list[Strategy]:
    return [find(name) for name in (STRATEGIES if names is None else names)]


def verify_program(
    programs: Programs, transport: str = "process", device: str = "cpu"
) -> Iterator[dict]:
    """Yield `check`'s row per case for a pipeline's programs, on as many ranks as they are for."""
    size = len(programs)
    order_of(programs, size)  # raises before a rank starts
    with Cluster(size, transport, device) as cluster:
        for case in cases_of(programs):
            yield check("pipeline", case, size, cluster)


@dataclass(frozen=True, repr=False)
class Certificate:
    """A strategy's promise, and the rows that show it, each with its own promise.

    It prints as a table, and is true if all is as promised: `assert certify(reduce)` fails with its
    repr, one line that names the first wrong row and is as long as pytest shows.

    left_out  cases that the strategy refuses, and why
    """

    strategy: str
    promise: str
    evidence: list[dict]
    left_out: tuple[str, ...] = ()

    ok = property(lambda self: bool(self.evidence) and all(row["ok"] for row in self.evidence))

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        rows = [
            f"{'ok  ' if row['ok'] else 'FAIL'}  {row['ranks']} ranks  {row['case']:<38} "
            f"{row['bytes']:>9,} bytes  {row['detail']}"
            for row in self.evidence
        ]
        return "\n".join([self._head(), *rows, *(f"left out: {why}" for why in self.left_out)])

    def __repr__(self) -> str:
        wrong = [f"{row['case']}: {row['detail']}" for row in self.evidence if not row["ok"]]
        return in_one_line("; ".join([self._head(), *wrong[:1]]))

    def _head(self) -> str:
        n, verdict = len(self.evidence), "ok" if self.ok else "FAILED"
        of_all = f" on {n} of {n + len(self.left_out)} cases" if self.left_out else ""
        return f"{self.strategy}: {self.promise}, {verdict}{of_all}"

    def check(self) -> None:
        """Raise AssertionError, with the table, unless all is as promised."""
        if not self.ok:
            raise AssertionError(str(self))


def certificate(strategy: str, size: int = 4, transport: str = "process") -> Certificate:
    """Return the promise of a strategy and its evidence, on models that it fits.

    size  number of ranks; fewer if the strategy cannot use all of them
    """
    entry = find(strategy)
    size = max((ranks for ranks in entry.ranks if ranks <= size), default=size)
    return Certificate(strategy, entry.promise, list(verify([strategy], [size], transport)))


# What the reader has written.


def certify(
    strategy: str | Callable,
    model: nn.Module | None = None,
    inputs: np.ndarray | None = None,
    targets: np.ndarray | None = None,
    *,
    size: int | None = None,
    replay: Replay | None = None,
    identity: Identity | None = None,
    loss: Callable | None = None,
    trainer: bool = False,
    transport: str = "process",
    timeout: float | None = 60.0,
    **options,
) -> Certificate:
    """Run a strategy on real ranks; return its certificate, which prints as a table.

    model, inputs[B, ...], targets  to train on; none of them: the package's cases
    size      number of ranks; None: 4, and without a model also 3 and 2
    replay    [gradients of each rank's own examples] -> the gradients that `reduce` has to leave on
              every rank, bit for bit: the promise of what changes the numbers on purpose;
              called batch by batch, so that it can remember what `reduce` does; every case has
              a copy of it, as every rank has of `reduce`
    identity  ([gradients of each rank's own examples], [what each rank has afterwards]) -> two
              sides that have to be equal within the bound, such as what was sent plus what was
              kept, and what there was
    loss      of outputs and targets, with reduction_size=; by default the model's
    trainer   whether the function makes what trains (trainer.py), as a class does
    timeout   seconds after which a case of the reader's own ends in CommTimeout; None: never
    options   of a strategy of the package

    ValueError for what is no strategy, and for a model that it refuses; RankFailed for what it
    raises, with the rank's traceback; Deadlock for ranks that wait for each other.
    """
    runner = _runner(strategy, trainer, options)
    if (replay or identity) and (runner is not outcomes.of_reduce or (replay and identity)):
        raise WrongInput(
            "replay, or else identity, is a promise of reduce(model, group): write a worker as "
            "one, for after each rank's backward"
        )
    cases = _cases(model, inputs, targets, loss, options)
    sizes = [4, 3, 2] if size is None and model is None else [4 if size is None else size]
    if isinstance(strategy, str):
        if model is None:
            return certificate(strategy, sizes[0], transport)
        evidence = [check(strategy, cases[0], sizes[0], transport=transport)]
        return Certificate(strategy, find(strategy).promise, evidence)
    function = getattr(strategy, "func", strategy)  # of a partial
    name = getattr(function, "__name__", type(function).__name__)
    promised = partial(_promised, replay=replay, identity=identity)
    clusters = (Cluster(size, transport) for size in sizes)
    evidence, left_out = _evidence(partial(runner, strategy), promised, cases, clusters, timeout)
    evidence = [{"strategy": name} | each for each in evidence]
    promise = "replayed bitwise" if replay else "an identity" if identity else "exact"
    return Certificate(name, promise, evidence, left_out)


def _runner(strategy: str | Callable, trainer: bool, options: dict) -> Callable:
    """Return the function of outcomes.py for a name, a class, or a function of so many arguments.

    ValueError for anything else, and for options that only a strategy of the package has.
    """
    if isinstance(strategy, str):
        return outcomes.of_job
    for name in options:
        near = nearest(name, [p for p in inspect.signature(certify).parameters if p != "options"])
        remedy = f"did you mean {near}=?" if near else "give your own options by functools.partial"
        raise WrongInput(f"certify has no option {name!r}; {remedy}")
    if trainer or isinstance(getattr(strategy, "func", strategy), type):
        return outcomes.of_trainer
    if not callable(strategy):
        raise WrongInput(f"a strategy is a name or a function, not {strategy!r}")
    parameters = inspect.signature(strategy).parameters.values()
    count = len([p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD])
    runners = {2: outcomes.of_reduce, 4: outcomes.of_worker}
    if count not in runners:
        raise WrongInput(
            "a strategy is reduce(model, group), worker(group, model, inputs, targets), or a class "
            "that is made of (model, group) and has backward(batch); this one takes "
            f"{plural(count, 'argument')}"
        )
    return runners[count]


def _cases(model, inputs, targets, loss, options: dict) -> list[Case]:
    """Return the reader's case, in float64, or the package's."""
    if model is None:
        if inputs is not None or targets is not None or loss is not None or options:
            raise WrongInput("inputs, targets, loss and options are of a model; give it, too")
        return small_cases(4)
    if inputs is None or targets is None:
        raise WrongInput("a model needs inputs[B, ...] and targets to be certified on")
    return [readers_case(model, inputs, targets, loss, options)]


def _evidence(
    worker: partial,
    promised: Callable,
    cases: list[Case],
    clusters: Iterable[Cluster],
    timeout: float | None,
) -> tuple[list[dict], tuple[str, ...]]:
    """Return a row for each number of ranks and case, and in words what is left out."""
    rows: list[dict] = []
    left_out: list[str] = []
    pairs = [(case, replace(case, targets=np.roll(case.targets, 1, axis=0))) for case in cases]
    tried = [(batches, [one_device(batch) for batch in batches]) for batches in pairs]
    for cluster in clusters:
        if not all(row["ok"] for row in rows):
            break  # what is wrong on more ranks is known
        with cluster as ranks:
            for batches, wants in tried:
                name = batches[0].name
                try:
                    of_ranks = ranks.run(worker, batches, timeout=timeout)
                except RankFailed as failed:
                    _check_frozen(failed, batches[0])
                    if worker.func is outcomes.of_reduce or not is_wrong_input(failed):
                        raise
                    left_out.append(f"{name}, {ranks.size} ranks: {failed.__cause__}")
                else:
                    judge = by_value.copied(promised)  # a replay may remember
                    of_batches = _of_batches(batches, wants, of_ranks, judge)
                    rows.append({"case": name, "ranks": ranks.size} | of_batches)
    if not rows:
        raise WrongInput(left_out[0])
    return rows, tuple(left_out)


def _check_frozen(failed: RankFailed, case: Case) -> None:
    """Raise ValueError where a frozen parameter has no gradient to travel."""
    frozen = [name for name, p in case.model.named_parameters().items() if not p.requires_grad]
    if frozen and "NoneType" in (why := str(failed.__cause__)):
        remedy = "is not trained, and its p.grad is None; skip it by `if p.requires_grad`"
        raise WrongInput(f"{why}: {some(frozen)} {remedy}") from failed


def _of_batches(
    batches: tuple[Case, ...],
    wants: list[Gradients],
    of_ranks: list[list[Outcome]],
    promised: Callable,
) -> dict:
    """Return the row of two batches: of the first wrong one, or of the largest error."""
    rows: list[dict] = []
    for case, want, *ranks in zip(batches, wants, *of_ranks, strict=True):
        compared = row(case, ranks, *promised(case, ranks, want))
        second = "only in the second of two batches: " if rows and not compared["ok"] else ""
        rows.append(compared | {"detail": second + "; ".join(compared["detail"])})
        if not compared["ok"]:
            break
    return max(rows, key=lambda row: row["error"]) | {"bytes": rows[0]["bytes"]}


def _promised(
    case: Case,
    ranks: list[Outcome],
    want: Gradients,
    replay: Replay | None,
    identity: Identity | None,
) -> tuple[Promise, list[Gradients]]:
    """Return the promise of a batch, and the arrays that are compared with it."""
    names = set(trained(case.model))
    if not (replay or identity):  # which know nothing of running statistics
        names |= {name for rank in ranks for name in rank.gradients}
    got = [_only(names, rank.completed(want)) for rank in ranks]
    local = [_only(names, rank.local) for rank in ranks]
    if replay:
        want = _replayed(replay, local, _only(names, want))
        return Promise("replayed bitwise", want, "replay", 0.0), got
    if identity:
        left, right = _sides(identity, local, got)
        return Promise("an identity", right, "identity"), [left]
    return Promise("exact", _only(names, want), "exact"), got


def _only(names: set[str], gradients: Gradients) -> Gradients:
    return {name: g for name, g in gradients.items() if name in names}


def _replayed(replay: Replay, local: list[Gradients], like: Gradients) -> Gradients:
    """Return a replay's arrays; ValueError unless they are those of all trained parameters."""
    want = named_arrays("what a replay returns", replay(local), {})
    if lacking := [name for name in like if name not in want]:
        raise WrongInput(f"the replay lacks {some(lacking)}")
    for name, array in want.items():
        if name not in like or array.shape != like[name].shape:
            raise WrongInput(f"the replay's {name}{list(array.shape)} is no trained parameter's")
    return want


def _sides(identity: Identity, local: list[Gradients], got: list[Gradients]) -> list[Gradients]:
    """Return both sides; ValueError where they are the same, whatever the ranks have."""
    sides = []
    for ranks in (got, [{name: np.pi - 2 * g for name, g in each.items()} for each in got]):
        two = identity(local, ranks)
        if not isinstance(two, tuple | list) or len(two) != 2:
            raise WrongInput(f"an identity returns two sides, not {type(two).__name__}")
        sides.append([named_arrays("a side of an identity", side, {}) for side in two])
    for name in sides[0][0]:
        if all(same(a.get(name), b.get(name)) for a, b in zip(*sides, strict=True)):
            raise WrongInput(
                f"the identity of {name} holds whatever the ranks have: use them, its second "
                "argument"
            )
    return sides[0]
