"""Certify what the reader has written: a function over ranks, a worker, a holder of a model.

    certify("zero_1")                             a strategy of the package, on its own cases
    certify(reduce)                               reduce(model, group): leave the sum in p.grad
    certify(reduce, replay=f)                     f([each rank's gradients]) -> what is promised
    certify(worker)                               worker(group, model, x, y) -> {name: gradient}
    certify(make, trainer=True)                   make(model, group) -> what has backward(batch)
    certify(partial(Pipeline, schedule="1f1b", micro_batches=4))    a class: it makes a trainer

It runs on real ranks, in float64, on a model of the reader's or on four of the package, whose
batches do not divide by the ranks, with dropout, padding, tied weights and experts; and on two
batches in a row, the second with other targets. Compared are, on every rank, all parameters that
are trained, and what else a rank returns: with one device's gradient (compare.py has the bound),
or, bit for bit, with a replay, or as two sides of an identity. The weights may not change.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from minidist import nn
from minidist.comm import Cluster
from minidist.comm.local import worker as by_value
from minidist.errors import RankFailed, WrongInput, is_wrong_input, nearest, plural
from minidist.verify import equivalence, two_batches
from minidist.verify.causes.finding import some
from minidist.verify.equivalence import Certificate
from minidist.verify.strategies import Case, one_device
from minidist.verify.strategies.cases import given, small_cases


def certify(
    strategy: str | Callable,
    model: nn.Module | None = None,
    inputs: np.ndarray | None = None,
    targets: np.ndarray | None = None,
    *,
    size: int | None = None,
    replay: two_batches.Replay | None = None,
    identity: two_batches.Identity | None = None,
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
    run = _runner(strategy, trainer, options)
    promise = _promise(run, replay, identity)
    cases = _cases(model, inputs, targets, loss, options)
    sizes = [4, 3, 2] if size is None and model is None else [4 if size is None else size]
    if isinstance(strategy, str):
        return _of_package(strategy, None if model is None else cases[0], sizes[0], transport)
    judge = partial(two_batches.judged, replay=replay, identity=identity)
    start = partial(Cluster, transport=transport)
    rows, left_out = _rows(partial(run, strategy), judge, cases, sizes, start, timeout)
    named = getattr(strategy, "func", strategy)  # of a partial
    name = getattr(named, "__name__", type(named).__name__)
    rows = [{"strategy": name, "promise": promise} | row for row in rows]
    return Certificate(name, promise, rows, left_out)


def _rows(worker, judge, cases: list[Case], sizes: list[int], start, timeout):
    """Return a row for each number of ranks and case, and in words what is left out."""
    rows: list[dict] = []
    left_out: list[str] = []
    pairs = [(case, replace(case, targets=np.roll(case.targets, 1, axis=0))) for case in cases]
    tried = [(two, [one_device(batch) for batch in two]) for two in pairs]
    for size in sizes:
        if not all(row["ok"] for row in rows):
            break  # what is wrong on more ranks is known
        with start(size) as cluster:
            for two, want in tried:
                try:
                    found = cluster.run(worker, two, timeout=timeout)
                except RankFailed as failed:
                    _check_frozen(failed, two[0])
                    if worker.func is two_batches.run_reduce or not is_wrong_input(failed):
                        raise
                    left_out.append(f"{two[0].name}, {size} ranks: {failed.__cause__}")
                else:
                    row = by_value.copied(judge)(two, found, want)  # a replay may remember
                    rows.append({"case": two[0].name, "ranks": size} | row)
    if not rows:
        raise WrongInput(left_out[0])
    return rows, tuple(left_out)


def _check_frozen(failed: RankFailed, case: Case) -> None:
    """Raise ValueError where a frozen parameter has no gradient to travel."""
    frozen = [name for name, p in case.model.named_parameters().items() if not p.requires_grad]
    if frozen and "NoneType" in (why := str(failed.__cause__)):
        remedy = "is not trained, and its p.grad is None; skip it by `if p.requires_grad`"
        raise WrongInput(f"{why}: {some(frozen)} {remedy}") from failed


def _cases(model, inputs, targets, loss, options: dict) -> list[Case]:
    """Return the reader's case, in float64, or the package's."""
    if model is None:
        if inputs is not None or targets is not None or loss is not None or options:
            raise WrongInput("inputs, targets, loss and options are of a model; give it, too")
        return small_cases(4)
    if inputs is None or targets is None:
        raise WrongInput("a model needs inputs[B, ...] and targets to be certified on")
    return [given(model, inputs, targets, loss, options)]


def _promise(run: Callable, replay: Callable | None, identity: Callable | None) -> str:
    if (replay or identity) and (run is not two_batches.run_reduce or (replay and identity)):
        words = "replay, or else identity, is a promise of reduce(model, group)"
        raise WrongInput(f"{words}: write a worker as one, for after each rank's backward")
    return "replayed bitwise" if replay else "an identity" if identity else "exact"


def _runner(strategy: str | Callable, trainer: bool, options: dict) -> Callable:
    """Return what runs it on a rank: told by whether it is a class, and by its parameters."""
    if isinstance(strategy, str):
        return equivalence.check
    for name in options:
        near = nearest(name, [p for p in inspect.signature(certify).parameters if p != "options"])
        mean = f"did you mean {near}=?" if near else "give your own options by functools.partial"
        raise WrongInput(f"certify has no option {name!r}; {mean}")
    if trainer or isinstance(getattr(strategy, "func", strategy), type):
        return two_batches.run_trainer
    if not callable(strategy):
        raise WrongInput(f"a strategy is a name or a function, not {strategy!r}")
    asked = inspect.signature(strategy).parameters.values()
    count = len([p for p in asked if p.default is p.empty and p.kind is not p.VAR_KEYWORD])
    kinds = {2: two_batches.run_reduce, 4: two_batches.run_worker}
    if count not in kinds:
        raise WrongInput(
            "a strategy is reduce(model, group), worker(group, model, inputs, targets), or a class "
            "that is made of (model, group) and has backward(batch); this one takes "
            f"{plural(count, 'argument')}"
        )
    return kinds[count]


def _of_package(name: str, case: Case | None, size: int, transport: str) -> Certificate:
    if case is None:
        return equivalence.certificate(name, size, transport)
    row = equivalence.check(name, case, size, transport=transport)
    return Certificate(name, equivalence.find(name).promise, [row])
