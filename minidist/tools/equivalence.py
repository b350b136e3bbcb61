"""Hold a strategy to one sentence: its gradient is the one of a single device.

A strategy is run for real, on ranks, from the weights of a single-device model; then every
parameter's gradient on every rank, and the input's, is compared with one device's, in float64:
max|got - want| <= 1e-9 max(max|want|, 1e-3 g), where g is the largest gradient of the whole model.
Rounding is far below that bound, every mistake that we know of far above.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.backend import to_host
from minidist.comm import Cluster, Group
from minidist.data_parallel import bucketed, naive
from minidist.datasets import shard
from minidist.rng import Randomness, generator

BOUND = 1e-9
INPUT = "(input)"  # the name under which a floating input's gradient is compared


@dataclass(frozen=True)
class Case:
    """What a strategy is tried on: inputs[B, ...] are tokens or floats, targets fit the loss."""

    name: str
    model: nn.Module
    inputs: np.ndarray
    targets: np.ndarray
    loss: Callable = nn.cross_entropy
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """One rank's gradients by name, host arrays, and the bytes that others took from it."""

    gradients: dict[str, np.ndarray]
    bytes: int


@dataclass(frozen=True)
class Strategy:
    """A strategy as the tests see it.

    worker   (group, case, **options) -> Outcome, on every rank
    promise  "exact": equal to one device within the bound
    bytes    (case, ranks) -> bytes that all ranks together should move
    """

    name: str
    worker: Callable[..., Outcome]
    promise: str
    bytes: Callable[[Case, int], int]
    cases: Callable[[], list[Case]]


def one_device(case: Case) -> dict[str, np.ndarray]:
    """Return the gradients that one device computes; zero where a parameter is unused or frozen."""
    model = copy.deepcopy(case.model)
    x = _as_input(case.inputs)
    randomness = Randomness(case.seed, 0, np.arange(len(case.inputs)))
    case.loss(model(x, randomness), case.targets).backward()
    return collect(model, x)


def collect(model: nn.Module, x: Tensor | None = None) -> dict[str, np.ndarray]:
    """Return {name: gradient} of a model, zeros for None, and the input's if it has one."""
    named = dict(model.named_parameters())
    if isinstance(x, Tensor):
        named[INPUT] = x
    return {
        name: to_host(p.xp.zeros_like(p.data) if p.grad is None else p.grad).copy()
        for name, p in named.items()
    }


def _as_input(inputs):
    """Wrap floating inputs in a tensor, whose gradient is compared too; leave tokens alone."""
    return Tensor(inputs, requires_grad=True) if inputs.dtype.kind == "f" else inputs


def naive_worker(group: Group, case: Case, micro_batches: int = 1) -> Outcome:
    """Run one batch under data_parallel/naive.py, its examples dealt to ranks and micro-batches."""
    pieces = [_backward(case, part) for part in _parts(group, case, micro_batches)]
    naive.all_reduce_gradients(case.model, group)
    return _data_parallel_outcome(group, case, pieces, group.ledger.total)


def bucketed_worker(group: Group, case: Case, micro_batches: int = 1, cap: int = 300) -> Outcome:
    """Run one batch under data_parallel/bucketed.py, in buckets of `cap` bytes."""
    case.model.flatten(group.empty)
    reducer = bucketed.Bucketed(case.model, group, cap)
    *first, last = _parts(group, case, micro_batches)
    pieces = [_backward(case, part) for part in first]
    with reducer.reduce():
        pieces.append(_backward(case, last))
    return _data_parallel_outcome(group, case, pieces, reducer.group.ledger.total)


def _parts(group: Group, case: Case, micro_batches: int) -> list[np.ndarray]:
    """Return this rank's examples, cut into micro-batches."""
    mine = shard(np.arange(len(case.inputs)), group.rank, group.size)
    return np.array_split(mine, micro_batches)


def _backward(case: Case, examples: np.ndarray):
    """Add the gradient of these examples to the model's; return their input."""
    x = _as_input(case.inputs[examples])
    logits = case.model(x, Randomness(case.seed, 0, examples))
    case.loss(logits, case.targets[examples], reduction_size=case.targets.size).backward()
    return x


def _data_parallel_outcome(group: Group, case: Case, pieces: list, moved: int) -> Outcome:
    """Collect the gradients of a model that every rank holds, and of the input, which none does."""
    result = collect(case.model)
    if isinstance(pieces[0], Tensor):
        rows = [np.zeros_like(x.data) if x.grad is None else x.grad for x in pieces]
        result[INPUT] = group.all_gather(np.concatenate(rows))
    return Outcome(result, moved)


def data_parallel_bytes(case: Case, ranks: int) -> int:
    """Return 2 (N - 1) S: all parameters that are not frozen, once scattered, once gathered."""
    return 2 * (ranks - 1) * sum(p.data.nbytes for p in case.model.parameters() if p.requires_grad)


def small_cases() -> list[Case]:
    """An MLP on 7 examples and on 2, and a tied Transformer with dropout on 6."""
    random = generator(0, "cases")
    images, labels = random.standard_normal((7, 6)), random.integers(0, 3, 7)
    tokens, nexts = random.integers(0, 11, (2, 6, 5))
    mlp = nn.MLP([6, 9, 5, 3], activation="gelu", seed=1, dtype="float64")
    transformer = nn.Transformer(11, 8, 2, 2, 5, seed=2, dtype="float64", dropout=0.2, tied=True)
    return [
        Case("MLP, 7 examples", mlp, images, labels),
        Case("Transformer, 6 examples", transformer, tokens, nexts),
        Case("MLP, 2 examples", mlp, images[:2], labels[:2]),
    ]


STRATEGIES = {
    "naive": Strategy("naive", naive_worker, "exact", data_parallel_bytes, small_cases),
    "bucketed": Strategy("bucketed", bucketed_worker, "exact", data_parallel_bytes, small_cases),
}


def strategies() -> list[str]:
    return list(STRATEGIES)


def find(name: str) -> Strategy:
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}; there is {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


@dataclass(frozen=True)
class Comparison:
    """How far the gradients on all ranks are from one device's.

    difference  largest |got - want| of all
    error       largest |got - want| / max(max|want|, 1e-3 g), to be held against the bound
    parameter   the first one, in global order, beyond the bound; if none is, that of the largest
                error
    rank        the first rank where it is
    ratio       got / want at that parameter's largest difference: 0.25 and 4 speak for themselves
    """

    difference: float
    error: float
    parameter: str
    rank: int
    ratio: float
    bound: float = BOUND

    ok = property(lambda self: bool(self.error <= self.bound))

    def __str__(self):
        if self.ok:
            return f"largest error {self.error:.1e}"
        return (
            f"{self.parameter} differs on rank {self.rank}: largest error {self.error:.1e} "
            f"(bound {self.bound:.0e}), got/want = {self.ratio:.6g}"
        )


def compare(got: list[dict], want: dict[str, np.ndarray], bound: float = BOUND) -> Comparison:
    """Compare the gradients of every rank with one device's, parameter by parameter.

    What is missing, has another shape, is not finite, or is not wanted, is infinitely wrong.
    """
    if not got or not want:
        raise ValueError(f"nothing to compare: {len(got)} ranks, {len(want)} parameters")
    largest = max(_largest(w) for w in want.values())
    rows, difference = [], 0.0
    for name in dict.fromkeys([*want, *(name for gradients in got for name in gradients)]):
        for rank, gradients in enumerate(got):
            off, ratio = _difference(gradients.get(name), want.get(name))
            scale = max(_largest(want[name]), 1e-3 * largest) if name in want else 1.0
            difference = max(difference, off)
            rows.append((off / (scale or 1.0), name, rank, ratio))
    failing = [row for row in rows if not row[0] <= bound]
    _, name, rank, ratio = failing[0] if failing else max(rows)
    return Comparison(difference, max(row[0] for row in rows), name, rank, ratio, bound)


def _largest(w: np.ndarray) -> float:
    """Return the largest absolute value among the finite elements, or 0."""
    return float(np.abs(w, where=np.isfinite(w), out=np.zeros(w.shape)).max(initial=0.0))


def _difference(g: np.ndarray | None, w: np.ndarray | None) -> tuple[float, float]:
    """Return the largest |g - w| and the ratio g / w there (nan where w is 0)."""
    if g is None or w is None or g.shape != w.shape:
        return np.inf, np.nan
    g, w = g.astype(np.float64), w.astype(np.float64)
    off = np.abs(
        np.subtract(g, w, where=np.isfinite(g) & np.isfinite(w), out=np.full(w.shape, np.inf))
    )
    if not off.size:
        return 0.0, np.nan
    worst = np.unravel_index(off.argmax(), off.shape)
    compared = np.isfinite(off[worst]) and w[worst] != 0
    return float(off[worst]), float(g[worst] / w[worst]) if compared else np.nan


def _outcomes(strategy, case, size, cluster, transport, options) -> list[Outcome]:
    if cluster is not None and cluster.size != size:
        raise ValueError(f"the cluster has {cluster.size} ranks, not {size}")
    with nullcontext(cluster) if cluster is not None else Cluster(size, transport) as ranks:
        return ranks.run(partial(strategy.worker, **options), case)


def gradients(
    strategy: str,
    model: nn.Module,
    inputs: np.ndarray,
    targets: np.ndarray,
    size: int,
    loss: Callable = nn.cross_entropy,
    transport: str = "process",
    cluster: Cluster | None = None,
    **options,
) -> dict[str, np.ndarray]:
    """Return {global name: gradient} after one batch under `strategy` on `size` real ranks.

    The ranks start from the weights of `model`, a single-device model, which stays as it is. Every
    rank's result is looked at: where two differ by more than the bound, ValueError. `cluster`:
    ranks that are up already, instead of new ones.
    """
    case = Case("given", model, np.asarray(inputs), np.asarray(targets), loss)
    outcomes = _outcomes(find(strategy), case, size, cluster, transport, options)
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
    **options,
) -> dict:
    """Run one case on `size` ranks; return its row, as a dictionary.

    It holds strategy, case, ranks, promise, error, difference, bytes, bytes_formula, ok, detail.
    """
    entry = find(strategy)
    outcomes = _outcomes(entry, case, size, cluster, transport, options)
    comparison = compare([o.gradients for o in outcomes], one_device(case))
    moved, formula = sum(o.bytes for o in outcomes), entry.bytes(case, size)
    detail = (
        str(comparison) if moved == formula else f"{comparison}; {moved} bytes moved, not {formula}"
    )
    return {
        "strategy": strategy,
        "case": case.name,
        "ranks": size,
        "promise": entry.promise,
        "error": comparison.error,
        "difference": comparison.difference,
        "bytes": moved,
        "bytes_formula": formula,
        "ok": comparison.ok and moved == formula,
        "detail": detail,
    }


def verify(
    names: list[str] | None = None, sizes: Iterable[int] = (1, 2, 3, 4), transport: str = "process"
) -> Iterator[dict]:
    """Yield `check`'s row per number of ranks, strategy (None: all) and case."""
    names = strategies() if names is None else names
    for name in names:
        find(name)
    for size in sizes:
        with Cluster(size, transport) as cluster:
            for name in names:
                for case in find(name).cases():
                    yield check(name, case, size, cluster)


@dataclass(frozen=True)
class Certificate:
    """A strategy's promise, and the rows of `check` that show it."""

    strategy: str
    promise: str
    evidence: list[dict]

    ok = property(lambda self: bool(self.evidence) and all(row["ok"] for row in self.evidence))


def certificate(strategy: str, size: int = 4, transport: str = "process") -> Certificate:
    """Return the promise of a strategy and its evidence, on models that it fits."""
    return Certificate(
        strategy, find(strategy).promise, list(verify([strategy], [size], transport))
    )
