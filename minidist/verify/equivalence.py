"""Check one statement for every strategy: its gradient equals the gradient of a single device.

A strategy is run for real, on ranks, from the weights of a single-device model. Then the gradient
of every parameter and of the input is compared with one device's, on every rank, in float64.
`strategies/` has the strategies, `compare.py` the bound.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from minidist import nn
from minidist.backend import as_array
from minidist.comm import Cluster
from minidist.errors import RankFailed, WrongInput, check_name, is_wrong_input
from minidist.pipeline_parallel.actions import Programs
from minidist.pipeline_parallel.schedules import order_of
from minidist.verify.causes.diagnosis import byte_words, diagnosis
from minidist.verify.compare import Comparison, compare, in_one_line
from minidist.verify.strategies import STRATEGIES, Case, Strategy, one_device
from minidist.verify.strategies.cases import Outcome
from minidist.verify.strategies.program import cases_of

SIZES = 1, 2, 3, 4, 8  # numbers of ranks that `verify` tries
REORDERED = ", up to the order of sums, 1e-9"  # of BOUND: ends a promise of bits


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

    It holds strategy, case, ranks, promise, error, difference, bytes, bytes_formula, ok, detail.
    Where a library, MPI or NCCL, has added up in an order of its own, a promise of bits is one of
    the bound, and the row's promise says so.

    rerun  whether wrong gradients are compared with those of the register's mistakes (causes/)
    """
    entry, case = find(strategy), replace(case, options=case.options | options)
    outcomes = _outcomes(entry, case, size, cluster, transport, device)
    promise, comparison = _compared(entry, case, outcomes)
    moved, formula = sum(o.bytes for o in outcomes), entry.costs.bytes(case, size)
    detail = [str(comparison)]
    if not comparison.ok:
        detail += diagnosis(entry, case, outcomes, moved == formula, rerun)
    return {
        "strategy": strategy,
        "case": case.name,
        "ranks": size,
        "promise": promise,
        "error": comparison.error,
        "difference": comparison.difference,
        "bytes": moved,
        "bytes_formula": formula,
        "ok": comparison.ok and moved == formula,
        "detail": "; ".join(detail + byte_words(outcomes, formula)),
    }


def _compared(entry: Strategy, case: Case, outcomes: list[Outcome]) -> tuple[str, Comparison]:
    """Return what is promised of these outcomes, and their comparison with what they should be."""
    found, reference = [o.gradients for o in outcomes], outcomes[0].reference
    if reference is None:
        return "exact", compare(found, one_device(case))
    if entry.promise == "exact":
        return "exact", compare(found, reference)
    if any(o.reordered for o in outcomes):
        return entry.promise + REORDERED, compare(found, reference)
    return entry.promise, compare(found, reference, 0.0)


def _outcomes(
    entry: Strategy, case: Case, size: int, cluster: Cluster | None, transport: str, device: str
) -> list[Outcome]:
    """Run a strategy's worker on ranks, old or new; ValueError where it cannot split the case."""
    if cluster is not None and cluster.size != size:
        raise WrongInput(f"the cluster has {cluster.size} ranks, not {size}")
    entry.check(case, size)
    worker = partial(entry.worker, **case.options)
    with nullcontext(cluster) if cluster else Cluster(size, transport, device) as ranks:
        try:
            return ranks.run(worker, case)
        except RankFailed as failed:
            if is_wrong_input(failed):
                raise WrongInput(str(failed.__cause__)) from failed
            raise


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
    record = find(strategy)
    x, y = as_array(inputs), as_array(targets)
    case = Case("given", model, x, y, loss or model.loss, options=options)
    outcomes = _outcomes(record, case, size, cluster, transport, device)
    found = [outcome.gradients for outcome in outcomes]
    agreement = compare(found, found[0])
    if not agreement.ok:
        raise WrongInput(f"the ranks do not agree with rank 0: {agreement}")
    return {name: found[0][name] for name in model.named_parameters()}


def verify(
    names: list[str] | None = None,
    sizes: Iterable[int] = SIZES,
    transport: str = "process",
    device: str = "cpu",
) -> Iterator[dict]:
    """Yield `check`'s row per number of ranks, strategy (None: all) and case."""
    names = strategies() if names is None else names
    for name in names:
        find(name)
    red: set[str] = set()  # the register's mistakes run for the first red row of a strategy
    for size in sizes:
        with Cluster(size, transport, device) as cluster:
            for entry in (find(name) for name in names if size in find(name).ranks):
                for case in entry.cases(size):
                    row = check(entry.name, case, size, cluster, rerun=entry.name not in red)
                    if not row["ok"]:
                        red.add(entry.name)
                    yield row


def verify_program(
    programs: Programs, transport: str = "process", device: str = "cpu"
) -> Iterator[dict]:
    """Yield `check`'s row per case for a pipeline's programs, on as many ranks as they are for."""
    size = len(programs)
    order_of(programs, size)  # raises before a rank starts
    with Cluster(size, transport, device) as cluster:
        for case in cases_of(programs):
            yield check("pipeline", case, size, cluster)


def number_of_cases(names: list[str] | None, size: int) -> int:
    """Return how many rows `verify` has for these strategies on this number of ranks."""
    chosen = [find(name) for name in (strategies() if names is None else names)]
    return sum(len(list(strategy.cases(size))) for strategy in chosen if size in strategy.ranks)


@dataclass(frozen=True, repr=False)
class Certificate:
    """A strategy's promise, and the rows of `check` that show it, each with its own promise.

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
