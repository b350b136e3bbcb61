"""What a rank has after a batch: one outcome, whatever is certified.

    of_job       a strategy of the package: its record's `start` makes a job
    of_reduce    reduce(model, group): leaves sums in p.grad, after each rank's own backward
    of_worker    worker(group, model, x, y) -> {name: gradient}
    of_trainer   make(model, group) -> what has backward(batch)

Each of the last three takes (function, group, batches) and runs on every rank; a second batch shows
what is wrongly kept of the first.
"""

import copy
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from minidist.autograd import Tensor
from minidist.backend import to_host
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.nn.datasets import Batch
from minidist.parallel.trainer import loss_of
from minidist.verify.interop.torch import as_numpy
from minidist.verify.strategies.cases import Case, collect, trained

Gradients = dict[str, np.ndarray]


@dataclass
class Outcome:
    """What one rank has after a batch; all arrays are on the host.

    gradients   by name
    bytes       that this rank has sent for them
    operations  {operation: bytes that it moved}, if they are known
    reference   what `gradients` should be, if that is not one device's gradient: within the bound
                if the promise is exact, else bit for bit
    message     the cause in words, if `gradients` differ from the reference and a job knows it
    reordered   whether a library added up in an order of its own, see Fabric
    held        {name: which elements the rank has}, if it may have parts of parameters only
    local       what its own examples gave, before `reduce`
    changed     names of the weights that are other ones than before
    losses      of the batches, in their order, if a job has them
    returned    of what type the arrays are that `reduce` has returned; or ""
    """

    gradients: Gradients
    bytes: int = 0
    operations: dict[str, int] = field(default_factory=dict)
    reference: Gradients | None = None
    message: str | None = None
    reordered: bool = False
    held: Gradients = field(default_factory=dict)
    local: Gradients = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    returned: str = ""
    losses: list[float] = field(default_factory=list)

    def completed(self, want: Gradients) -> Gradients:
        """Return whole gradients: the elements that this rank does not have are those of want."""
        if not self.held:
            return self.gradients
        return {n: np.where(self.held[n], g, want[n]) for n, g in self.gradients.items()}


def of_job(start: Callable, group: Group, case: Case, /, **options) -> Outcome:
    """Run a case on the ranks' device; what the job sends to show its result is not counted."""
    job = start(group, case.to(group.device), **options)
    job.begin(job.rule)
    job.backward()
    sent = job.sent()
    result = job.result()
    sent.subtract(job.sent())
    job.step()
    sent.update(job.sent())
    sent = +sent  # without what only the result has moved
    reference, message = job.reference(result)
    return Outcome(
        _on_host(result),
        sent.total(),
        dict(sent),
        None if reference is None else _on_host(reference),
        message,
        group.fabric.reordered,
        losses=job.losses,
    )


def _on_host(arrays: Mapping) -> Gradients:
    return {name: to_host(array) for name, array in arrays.items()}


def of_reduce(reduce: Callable, group: Group, batches: Sequence[Case]) -> list[Outcome]:
    """Run `reduce(model, group)` after the backward pass of this rank's examples."""
    outcomes = []
    for case in batches:
        model, weights = case.model, case.model.state()
        loss_of(model, case.batch.share(group.rank, group.size)).backward()
        local = collect(model)
        returned = _instead(reduce(model, group))
        changed = [n for n, p in trained(model).items() if not same(weights[n], p.data)]
        sent = group.ledger.bytes.total()
        outcome = Outcome(collect(model), sent, local=local, changed=changed, returned=returned)
        outcomes.append(outcome)
        model.load_state(weights)  # and the running statistics
        model.zero_grad()
    return outcomes


def _instead(result: object) -> str:
    """Return the type of what `reduce` returned, if it is arrays or code that never ran; or ""."""
    inside = [*result.values()] if isinstance(result, dict) else result
    arrays = isinstance(inside, list | tuple) and any(hasattr(x, "dtype") for x in inside)
    return type(result).__name__ if arrays or isinstance(result, Generator | Coroutine) else ""


def same(a: np.ndarray, b) -> bool:
    return b is not None and np.array_equal(a, to_host(b), equal_nan=True)


def of_worker(worker: Callable, group: Group, batches: Sequence[Case]) -> list[Outcome]:
    """Run a worker; None, as a parameter has that its examples did not use, is a gradient of 0."""
    outcomes = []
    for case in batches:
        shapes = {name: p.shape for name, p in case.model.named_parameters().items()}
        returned = worker(group, copy.deepcopy(case.model), case.inputs, case.targets)
        gradients = named_arrays("what a worker returns", returned, shapes)
        outcomes.append(Outcome(gradients, group.ledger.bytes.total()))
    return outcomes


def of_trainer(make: Callable, group: Group, batches: Sequence[Case]) -> list[Outcome]:
    """Run a trainer's backward; its parameters say which elements of the model they are."""
    model, outcomes = batches[0].model, []
    shapes = {name: p.shape for name, p in trained(model).items()}  # before the model is cut
    trainer = make(model, group)
    for case in batches:
        gradients = {name: np.zeros(shape) for name, shape in shapes.items()}
        held = {name: np.zeros(shape, bool) for name, shape in shapes.items()}
        before = {p: to_host(p.data).copy() for p in trainer.parameters() if p.requires_grad}
        trainer.backward(Batch(case.inputs, case.targets, case.seed))
        for p in before:
            grad = np.zeros(p.size) if p.grad is None else to_host(p.grad).reshape(-1)
            ends = np.cumsum([len(piece) for piece in p.slices])
            for piece, values in zip(p.slices, np.split(grad, ends[:-1]), strict=True):
                real = (at := piece.positions()) >= 0  # the others are padding
                gradients[piece.name].flat[at[real]] = values[real]
                held[piece.name].flat[at[real]] = True
            p.grad = None
        changed = [p.name for p, weights in before.items() if not same(weights, p.data)]
        sent = sum(each.ledger.bytes.total() for each in trainer.groups)
        outcomes.append(Outcome(gradients, sent, held=held, changed=changed))
        model.zero_grad()
    return outcomes


def named_arrays(description: str, returned: object, shapes: Mapping[str, tuple]) -> Gradients:
    """Return {name: array} of arrays, tensors and None; ValueError for anything else."""
    if not isinstance(returned, Mapping):
        raise WrongInput(f"{description} is {{name: array}}, not {type(returned).__name__}")
    arrays = {name: g.data if isinstance(g, Tensor) else g for name, g in returned.items()}
    return {
        name: np.zeros(shapes.get(name, ())) if g is None else np.asarray(as_numpy(g))
        for name, g in arrays.items()
    }
