"""Check one statement for every strategy: its gradient equals the gradient of a single device.

A strategy is run for real, on ranks, from the weights of a single-device model. Then the gradient
of every parameter and of the input is compared with one device's, on every rank, in float64.
`strategies/` has the strategies, `compare.py` the bound.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from minidist import nn
from minidist.backend import as_array
from minidist.comm import Cluster, Group
from minidist.comm.ledger import BY_FORMULA
from minidist.errors import RankFailed, is_wrong_input
from minidist.pipeline_parallel.schedules import order_of
from minidist.tools.causes import cause_of
from minidist.tools.causes.finding import Finding
from minidist.tools.causes.gradients import cause, right_from
from minidist.tools.compare import Comparison, compare
from minidist.tools.strategies import STRATEGIES, Case, Outcome, Strategy, one_device
from minidist.tools.strategies.program import cases_of

SIZES = 1, 2, 3, 4, 8  # numbers of ranks that `verify` tries
REORDERED = ", up to the order of sums, 1e-9"  # of BOUND: ends a promise of bits


def strategies() -> list[str]:
    return list(STRATEGIES)


def find(name: str) -> Strategy:
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}; choose one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def _on_device(group: Group, worker: Callable, case: Case) -> Outcome:
    """Run a strategy's worker with model and arrays on the ranks' device."""
    outcome = worker(group, case.to(group.device)).to_host()
    return replace(outcome, reordered=group.fabric.reordered)


def _outcomes(strategy, case, size, cluster, transport, device, options) -> list[Outcome]:
    if cluster is not None and cluster.size != size:
        raise ValueError(f"the cluster has {cluster.size} ranks, not {size}")
    strategy.check(case, size, options)
    worker = partial(strategy.worker, **case.options | options)
    new = None if cluster is not None else Cluster(size, transport, device)
    with new or nullcontext(cluster) as ranks:
        try:
            return ranks.run(_on_device, worker, case)
        except RankFailed as failed:
            if is_wrong_input(failed):
                raise ValueError(str(failed.__cause__)) from failed
            raise


def gradients(
    strategy: str,
    model: nn.Module,
    inputs: np.ndarray,
    targets: np.ndarray,
    size: int,
    loss: Callable = nn.cross_entropy,
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
    case = Case("given", model, as_array(inputs), as_array(targets), loss)
    outcomes = _outcomes(find(strategy), case, size, cluster, transport, device, options)
    found = [outcome.gradients for outcome in outcomes]
    agreement = compare(found, found[0])
    if not agreement.ok:
        raise ValueError(f"the ranks do not agree with rank 0: {agreement}")
    return {name: found[0][name] for name in model.named_parameters()}


def check(
    strategy: str,
    case: Case,
    size: int,
    cluster: Cluster | None = None,
    transport: str = "process",
    device: str = "cpu",
    **options,
) -> dict:
    """Run one case on `size` ranks; return its row, as a dictionary. Options as in `gradients`.

    It holds strategy, case, ranks, promise, error, difference, bytes, bytes_formula, ok, detail.
    Where a library, MPI or NCCL, has added up in an order of its own, a promise of bits is one of
    the bound, and the row's promise says so.
    """
    entry = find(strategy)
    outcomes = _outcomes(entry, case, size, cluster, transport, device, options)
    promise, comparison = _compared(entry, case, outcomes)
    computed = {op: None for o in outcomes for op in o.operations if op.endswith(BY_FORMULA)}
    moved, formula = sum(o.bytes for o in outcomes), entry.costs.bytes(case, size)
    said = [str(comparison)]
    if not comparison.ok:
        said += [words for words in _causes(entry, case, outcomes, moved == formula) if words]
    if moved != formula:
        said.append(f"{moved} bytes moved, not {formula}{_operations(outcomes)}")
    if computed:
        said.append(f"not counted: {', '.join(computed)}")
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
        "detail": "; ".join(said),
    }


def _compared(entry: Strategy, case: Case, outcomes: list[Outcome]) -> tuple[str, Comparison]:
    """Return what is promised of these outcomes, and their comparison with what they should be."""
    found, reference = [o.gradients for o in outcomes], outcomes[0].reference
    if reference is None:
        return "exact", compare(found, one_device(case))
    if any(o.reordered for o in outcomes):
        return entry.promise + REORDERED, compare(found, reference)
    return entry.promise, compare(found, reference, 0.0)


def _causes(entry: Strategy, case: Case, outcomes: list[Outcome], right_bytes: bool) -> list:
    """Return what the numbers show about the cause and its place."""
    want = outcomes[0].reference
    if want is not None:
        return [cause_of.versions([o.used for o in outcomes]) or outcomes[0].said]
    weights = case.model.state()
    held = tuple(
        {n: (w, weights[n] if s is None else s.of(weights[n])) for n, (w, s) in o.held.items()}
        for o in outcomes
    )
    got = [o.gradients for o in outcomes]
    finding = Finding(got, one_device(case), case, entry.split(case, len(got)), held, right_bytes)
    return [cause(finding), right_from(finding)]


def _operations(outcomes: list[Outcome]) -> str:
    """Return the bytes that moved, per operation, if they are known per operation."""
    moved = sum((Counter(o.operations) for o in outcomes), start=Counter())
    parts = ", ".join(f"{operation} {n}" for operation, n in moved.items())
    return f" ({parts})" if parts else ""


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
    for size in sizes:
        with Cluster(size, transport, device) as cluster:
            for name in names:
                for case in find(name).cases(size) if size in find(name).ranks else []:
                    yield check(name, case, size, cluster)


def verify_program(
    programs: list, transport: str = "process", device: str = "cpu"
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


@dataclass(frozen=True)
class Certificate:
    """A strategy's promise, and the rows of `check` that show it, each with its own promise."""

    strategy: str
    promise: str
    evidence: list[dict]

    ok = property(lambda self: bool(self.evidence) and all(row["ok"] for row in self.evidence))


def certificate(strategy: str, size: int = 4, transport: str = "process") -> Certificate:
    """Return the promise of a strategy and its evidence, on models that it fits.

    size  number of ranks; fewer if the strategy cannot use all of them
    """
    entry = find(strategy)
    size = max((ranks for ranks in entry.ranks if ranks <= size), default=size)
    return Certificate(strategy, entry.promise, list(verify([strategy], [size], transport)))
