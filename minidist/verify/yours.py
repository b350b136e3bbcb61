"""Certify what the reader has written: a function over ranks, a worker, a holder of a model.

    certify("zero_1")                             a strategy of the package, on its own cases
    certify(reduce)                               reduce(model, group): leave the sum in p.grad
    certify(reduce, replay=f)                     f([each rank's gradients]) -> what is promised
    certify(worker)                               worker(group, model, x, y) -> {name: gradient}
    certify(make, trainer=True)                   make(model, group) -> what has backward(batch)
    certify(partial(Pipeline, schedule="1f1b", micro_batches=4))    a class: it makes a trainer

It runs on real ranks, in float64, on a model of the reader's or on four of the package, whose
batches do not divide by the ranks, with dropout, padding, tied weights and experts. Compared are,
on every rank, all parameters that are trained, and what else a rank returns: with one device's
gradient (compare.py has the bound), or, bit for bit, with a replay, or as two sides of an identity.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.backend import to_host
from minidist.comm import Cluster, Group
from minidist.datasets import Batch
from minidist.errors import RankFailed, counted, is_wrong_input
from minidist.interop.torch import as_numpy
from minidist.verify import equivalence
from minidist.verify.causes.finding import Finding
from minidist.verify.causes.gradients import reasons
from minidist.verify.compare import BOUND, compare
from minidist.verify.equivalence import Certificate
from minidist.verify.strategies import Case, one_device
from minidist.verify.strategies.cases import Division, collect, given, small_cases, trained
from minidist.verify.strategies.data_parallel import Replicas

Gradients = dict[str, np.ndarray]
Replay = Callable[[list[Gradients]], Gradients]
Identity = Callable[[list[Gradients], list[Gradients]], tuple[Gradients, Gradients]]


@dataclass
class Found:
    """What one rank has after a batch.

    bytes      that it has sent
    gradients  by name
    held       {name: which elements the rank has}, if it may have parts of parameters only
    local      what its own examples gave, before `reduce`
    """

    bytes: int
    gradients: Gradients
    held: Gradients = field(default_factory=dict)
    local: Gradients = field(default_factory=dict)

    def completed(self, want: Gradients) -> Gradients:
        """Return whole gradients: the elements that this rank does not have are those of want."""
        if not self.held:
            return self.gradients
        return {n: np.where(self.held[n], g, want[n]) for n, g in self.gradients.items()}


def certify(
    strategy: str | Callable,
    model: nn.Module | None = None,
    inputs: np.ndarray | None = None,
    targets: np.ndarray | None = None,
    *,
    size: int = 4,
    replay: Replay | None = None,
    identity: Identity | None = None,
    loss: Callable | None = None,
    trainer: bool = False,
    transport: str = "process",
    timeout: float | None = None,
    **options,
) -> Certificate:
    """Run a strategy on `size` real ranks; return its certificate, which prints as a table.

    model, inputs[B, ...], targets  to train on; none of them: the package's cases
    replay    [gradients of each rank's own examples] -> the gradients that `reduce` has to leave on
              every rank, bit for bit: the promise of a strategy that changes the numbers on purpose
    identity  (the same, [what each rank has afterwards]) -> two sides that have to be equal within
              the bound, such as what was sent plus what was kept, and what there was
    loss      of outputs and targets, with reduction_size=; by default the model's
    trainer   whether the function makes what trains (trainer.py), as a class does
    timeout   seconds after which a case of the reader's own ends in CommTimeout
    options   of a strategy of the package

    ValueError for what is no strategy, and for a model that it refuses; RankFailed for what it
    raises, with the rank's traceback; Deadlock for ranks that wait for each other.
    """
    run = _runner(strategy, trainer, options)
    promise = _promise(run, replay, identity)
    cases = _cases(model, inputs, targets, loss, size, options)
    if isinstance(strategy, str):
        return _of_package(strategy, None if model is None else cases[0], size, transport)
    rows, left_out, name = [], [], _name_of(strategy)
    with Cluster(size, transport) as cluster:
        for case in cases:
            try:
                found = cluster.run(partial(run, strategy), case, timeout=timeout)
            except RankFailed as failed:
                if run is _run_reduce or not is_wrong_input(failed):
                    raise
                left_out.append(f"{case.name}: {failed.__cause__}")
                if len(left_out) == len(cases):
                    raise ValueError(left_out[0]) from failed
            else:
                row = {"strategy": name, "case": case.name, "ranks": size, "promise": promise}
                rows.append(row | _judged(case, found, replay, identity))
    return Certificate(name, promise, rows, tuple(left_out))


def _cases(model, inputs, targets, loss, size: int, options: dict) -> list[Case]:
    """Return the reader's case, in float64, or the package's."""
    if model is None:
        if inputs is not None or targets is not None or loss is not None or options:
            raise ValueError("inputs, targets, loss and options are of a model; give it, too")
        return small_cases(size)
    if inputs is None or targets is None:
        raise ValueError("a model needs inputs[B, ...] and targets to be certified on")
    return [given(model, inputs, targets, loss, options)]


def _promise(run: Callable, replay: Replay | None, identity: Identity | None) -> str:
    if (replay or identity) and (run is not _run_reduce or (replay and identity)):
        raise ValueError("replay, or else identity, is a promise of reduce(model, group)")
    return "replayed bitwise" if replay else "an identity" if identity else "exact"


def _runner(strategy: str | Callable, trainer: bool, options: dict) -> Callable:
    """Return what runs it on a rank: told by whether it is a class, and by its parameters."""
    if isinstance(strategy, str):
        return equivalence.check
    if options:
        raise ValueError(f"{', '.join(options)}: give your own options by functools.partial")
    if trainer or isinstance(getattr(strategy, "func", strategy), type):
        return _run_trainer
    if not callable(strategy):
        raise ValueError(f"a strategy is a name or a function, not {strategy!r}")
    asked = inspect.signature(strategy).parameters.values()
    count = len([p for p in asked if p.default is p.empty and p.kind is not p.VAR_KEYWORD])
    kinds = {2: _run_reduce, 4: _run_worker}
    if count not in kinds:
        raise ValueError(
            "a strategy is reduce(model, group), worker(group, model, inputs, targets), or a class "
            "that is made of (model, group) and has backward(batch); this one takes "
            f"{counted(count, 'argument')}"
        )
    return kinds[count]


def _of_package(name: str, case: Case | None, size: int, transport: str) -> Certificate:
    if case is None:
        return equivalence.certificate(name, size, transport)
    row = equivalence.check(name, case, size, transport=transport)
    return Certificate(name, equivalence.find(name).promise, [row])


def _name_of(strategy: Callable) -> str:
    named = getattr(strategy, "func", strategy)  # of a partial
    return getattr(named, "__name__", type(named).__name__)


# On a rank.


def _run_reduce(reduce: Callable, group: Group, case: Case) -> Found:
    """Run `reduce(model, group)` after the backward pass of this rank's examples."""
    local: Gradients = {}

    def noted(model: nn.Module, group: Group) -> None:
        local.update(collect(model))
        reduce(model, group)

    job = Replicas(group, case, noted)
    job.backward(lambda loss: loss)
    return Found(job.sent().total(), collect(job.model), local=local)


def _run_worker(worker: Callable, group: Group, case: Case) -> Found:
    """Run a worker; None, as a parameter has that its examples did not use, is a gradient of 0."""
    shapes = {name: p.shape for name, p in case.model.named_parameters().items()}
    returned = worker(group, case.model, case.inputs, case.targets)
    if not isinstance(returned, dict):
        raise ValueError(f"a worker returns {{name: gradient}}, not {type(returned).__name__}")
    arrays = {name: g.data if isinstance(g, Tensor) else g for name, g in returned.items()}
    gradients = {
        name: np.zeros(shapes.get(name, ())) if g is None else as_numpy(g)
        for name, g in arrays.items()
    }
    return Found(group.ledger.bytes.total(), gradients)


def _run_trainer(make: Callable, group: Group, case: Case) -> Found:
    """Run a trainer's backward; its parameters say which elements of the model they are."""
    shapes = {name: p.shape for name, p in trained(case.model).items()}
    gradients = {name: np.zeros(shape) for name, shape in shapes.items()}
    held = {name: np.zeros(shape, bool) for name, shape in shapes.items()}
    holder = make(case.model, group)
    holder.backward(Batch(case.inputs, case.targets, case.seed))
    for p in (p for p in holder.parameters() if p.requires_grad):
        grad = np.zeros(p.size) if p.grad is None else to_host(p.grad).reshape(-1)
        ends = np.cumsum([len(piece) for piece in p.slices])
        for piece, values in zip(p.slices, np.split(grad, ends[:-1]), strict=True):
            real = (at := piece.positions()) >= 0  # the others are padding
            gradients[piece.name].flat[at[real]] = values[real]
            held[piece.name].flat[at[real]] = True
    return Found(sum(of.ledger.bytes.total() for of in holder.groups), gradients, held)


# Back with the caller.


def _judged(
    case: Case, found: list[Found], replay: Replay | None, identity: Identity | None
) -> dict:
    """Return the rest of a row: error, difference, bytes, ok, detail."""
    names = trained(case.model).keys() | set[str]().union(*(f.gradients for f in found))
    want = {name: g for name, g in one_device(case).items() if name in names}
    got, local = [f.completed(want) for f in found], [f.local for f in found]
    missing, bound = _missing(found), BOUND
    if replay:
        want, bound = replay(local), 0.0
    elif identity:
        left, want = identity(local, got)
        got = [left]
    comparison = compare(got, want, bound)
    detail = [str(comparison), *missing]
    if not comparison.ok:
        promise = "replay" if replay else "identity" if identity else "exact"
        split = Division(data=len(found))
        detail += reasons(Finding(got, want, case, split, promise=promise))
    return {
        "error": comparison.error,
        "difference": comparison.difference,
        "bytes": sum(f.bytes for f in found),
        "bytes_formula": None,
        "ok": comparison.ok and not missing,
        "detail": "; ".join(detail),
    }


def _missing(found: list[Found]) -> list[str]:
    """Say of which parameters there are elements that no rank has."""
    nowhere = {name: ~np.any([f.held[name] for f in found], axis=0) for name in found[0].held}
    return [f"no rank has {n.sum()} elements of {name}" for name, n in nowhere.items() if n.any()]
