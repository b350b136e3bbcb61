"""What a reader's code has on every rank after each of two batches; and is that what it promised?

Promised is one device's gradient, a replay's, or two sides that are equal. A second batch shows
what is wrongly kept of the first.
"""

import copy
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.backend import to_host
from minidist.comm import Group
from minidist.datasets import Batch
from minidist.errors import WrongInput
from minidist.interop.torch import as_numpy
from minidist.verify.causes.finding import Finding, Gradients, some
from minidist.verify.causes.gradients import reasons
from minidist.verify.compare import BOUND, compare
from minidist.verify.strategies.cases import Case, Division, collect, trained
from minidist.verify.strategies.data_parallel import Replicas

Replay = Callable[[list[Gradients]], Gradients]
Identity = Callable[[list[Gradients], list[Gradients]], tuple[Gradients, Gradients]]


@dataclass
class Found:
    """What one rank has after a batch.

    bytes      that it has sent so far
    gradients  by name
    held       {name: which elements the rank has}, if it may have parts of parameters only
    local      what its own examples gave, before `reduce`
    changed    names of the weights that are other ones than before
    returned   of what type the arrays are that `reduce` has returned; or ""
    """

    bytes: int
    gradients: Gradients
    held: Gradients = field(default_factory=dict)
    local: Gradients = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    returned: str = ""

    def completed(self, want: Gradients) -> Gradients:
        """Return whole gradients: the elements that this rank does not have are those of want."""
        if not self.held:
            return self.gradients
        return {n: np.where(self.held[n], g, want[n]) for n, g in self.gradients.items()}


def run_reduce(reduce: Callable, group: Group, batches: Sequence[Case]) -> list[Found]:
    """Run `reduce(model, group)` after the backward pass of this rank's examples."""
    return [_reduced(reduce, group, case) for case in batches]


def _reduced(reduce: Callable, group: Group, case: Case) -> Found:
    local: Gradients = {}
    returned: list[str] = []

    def noted(model: nn.Module, group: Group) -> None:
        local.update(collect(model))
        returned.append(_instead(reduce(model, group)))

    weights, model = case.model.state(), case.model
    job = Replicas(group, case, noted)
    job.backward(lambda loss: loss)
    changed = [n for n, p in trained(model).items() if not _equal(weights[n], p.data)]
    found = Found(job.sent().total(), collect(model), {}, local, changed, returned[0])
    model.load_state(weights)  # and the running statistics
    model.zero_grad()
    return found


def _instead(result) -> str:
    """Return the type of what `reduce` returned, if it is arrays or code that never ran; or ""."""
    inside = [*result.values()] if isinstance(result, dict) else result
    arrays = isinstance(inside, list | tuple) and any(hasattr(x, "dtype") for x in inside)
    return type(result).__name__ if arrays or isinstance(result, Generator | Coroutine) else ""


def _equal(a: np.ndarray, b) -> bool:
    return b is not None and np.array_equal(a, to_host(b), equal_nan=True)


def run_worker(worker: Callable, group: Group, batches: Sequence[Case]) -> list[Found]:
    """Run a worker; None, as a parameter has that its examples did not use, is a gradient of 0."""
    found = []
    for case in batches:
        shapes = {name: p.shape for name, p in case.model.named_parameters().items()}
        returned = worker(group, copy.deepcopy(case.model), case.inputs, case.targets)
        gradients = _arrays("what a worker returns", returned, shapes)
        found.append(Found(group.ledger.bytes.total(), gradients))
    return found


def run_trainer(make: Callable, group: Group, batches: Sequence[Case]) -> list[Found]:
    """Run a trainer's backward; its parameters say which elements of the model they are."""
    model, found = batches[0].model, []
    shapes = {name: p.shape for name, p in trained(model).items()}  # before the model is cut
    holder = make(model, group)
    for case in batches:
        gradients = {name: np.zeros(shape) for name, shape in shapes.items()}
        held = {name: np.zeros(g.shape, bool) for name, g in gradients.items()}
        own = {p: to_host(p.data).copy() for p in holder.parameters() if p.requires_grad}
        holder.backward(Batch(case.inputs, case.targets, case.seed))
        for p in own:
            grad = np.zeros(p.size) if p.grad is None else to_host(p.grad).reshape(-1)
            ends = np.cumsum([len(piece) for piece in p.slices])
            for piece, values in zip(p.slices, np.split(grad, ends[:-1]), strict=True):
                real = (at := piece.positions()) >= 0  # the others are padding
                gradients[piece.name].flat[at[real]] = values[real]
                held[piece.name].flat[at[real]] = True
            p.grad = None
        changed = [p.name for p, before in own.items() if not _equal(before, p.data)]
        sent = sum(of.ledger.bytes.total() for of in holder.groups)
        found.append(Found(sent, gradients, held, changed=changed))
        model.zero_grad()
    return found


def _arrays(what: str, returned, shapes: Mapping[str, tuple]) -> Gradients:
    """Return {name: array} of arrays, tensors and None; ValueError for anything else."""
    if not isinstance(returned, Mapping):
        raise WrongInput(f"{what} is {{name: array}}, not {type(returned).__name__}")
    arrays = {name: g.data if isinstance(g, Tensor) else g for name, g in returned.items()}
    return {
        name: np.zeros(shapes.get(name, ())) if g is None else np.asarray(as_numpy(g))
        for name, g in arrays.items()
    }


def judged(
    batches: Sequence[Case],
    found: list[list[Found]],
    one_device: list[Gradients],
    replay: Replay | None = None,
    identity: Identity | None = None,
) -> dict:
    """Return of a row: error, difference, bytes, ok, detail.  found: per rank, then per batch."""
    rows: list[dict] = []
    for k, case in enumerate(batches):
        ranks = [of_rank[k] for of_rank in found]
        rows.append(_judged(case, ranks, one_device[k], replay, identity))
        if not rows[k]["ok"]:
            if k:
                rows[k]["detail"] = f"only in the second of two batches: {rows[k]['detail']}"
            break
    return max(rows, key=lambda row: row["error"]) | {"bytes": rows[0]["bytes"]}


def _judged(case: Case, found: list[Found], want: Gradients, replay, identity) -> dict:
    names = set(trained(case.model))
    if not (replay or identity):  # which know nothing of running statistics
        names |= {name for f in found for name in f.gradients}
    got = [_only(names, f.completed(want)) for f in found]
    local, want, bound = [_only(names, f.local) for f in found], _only(names, want), BOUND
    if replay:
        want, bound = _replayed(replay, local, want), 0.0
    elif identity:
        left, want = _sides(identity, local, got)
        got = [left]
    comparison, faults = compare(got, want, bound), _faults(found)
    detail = faults or [str(comparison)]
    if not comparison.ok and (kind := found[0].returned):
        detail = [str(comparison), f"it returned a {kind}; it has to leave the sums in p.grad"]
    elif not comparison.ok:
        promise = "replay" if replay else "identity" if identity else "exact"
        finding = Finding(got, want, case, Division(data=len(found)), promise=promise)
        detail = [str(comparison), *faults, *reasons(finding)]
    return {
        "error": np.inf if faults else comparison.error,
        "difference": comparison.difference,
        "bytes": sum(f.bytes for f in found),
        "bytes_formula": None,
        "ok": comparison.ok and not faults,
        "detail": "; ".join(detail),
    }


def _only(names: set[str], gradients: Gradients) -> Gradients:
    return {name: g for name, g in gradients.items() if name in names}


def _faults(found: list[Found]) -> list[str]:
    """Return in words which elements no rank has, and which weights are other ones than before."""
    nowhere = {name: ~np.any([f.held[name] for f in found], axis=0) for name in found[0].held}
    missing = [f"{n.sum()} elements of {name}" for name, n in nowhere.items() if n.any()]
    changed = list(dict.fromkeys(name for f in found for name in f.changed))
    words = {"no rank has {}": missing, "only an optimizer may change the weights, not {}": changed}
    return [text.format(some(names)) for text, names in words.items() if names]


def _replayed(replay: Replay, local: list[Gradients], like: Gradients) -> Gradients:
    """Return a replay's arrays; ValueError unless they are those of all trained parameters."""
    want = _arrays("what a replay returns", replay(local), {})
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
        sides.append([_arrays("a side of an identity", side, {}) for side in two])
    for name in sides[0][0]:
        if all(_equal(a.get(name), b.get(name)) for a, b in zip(*sides, strict=True)):
            words = "holds whatever the ranks have: use them, its second argument"
            raise WrongInput(f"the identity of {name} {words}")
    return sides[0]
