"""One rank's shard of what several ranks have copies of, and how an optimizer updates it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from minidist import nn
from minidist.backend import Array
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.nn.flat_parameters import FlatParameters, FlatSlice, check_flat
from minidist.pieces import split_ends
from minidist.trainer import AnyOptimizer

ONLY_STEP = (
    "these are shards: call zero.step(optimizer), or hybrid.step(optimizer), "
    "which gives all ranks the new weights"
)


class LayerShard:
    """What this rank keeps of a run of a layer's flat vector, as a parameter of its own.

    run         the elements that the ranks of the group have copies of; cut as equally as can be
    own         this rank's elements of the run
    name        of the parameter
    whole, part  the layer's whole vector; the vector of this rank's part alone
    parameter   that part, which the optimizer updates
    """

    def __init__(self, run: FlatSlice, name: str, group: Group):
        self.run, self.whole, self.group = run, run.home, group
        ends = split_ends(run.stop - run.start, group.size)
        self.own = slice(ends[group.rank], ends[group.rank + 1])
        self.parameter = nn.Parameter(run.data[self.own], name)
        self.parameter.grad_dtype = run.gradient.dtype
        first = run.start + self.own.start
        mine = FlatSlice(run.home, first, first + len(self.parameter))
        self.parameter.cuts = mine.slices
        self.parameter.spread = "ZeRO's shards: pass sum_squares=zero.sum_squares"
        self.part = FlatParameters([self.parameter])  # copies
        self.part.locked, self.part.part_of = ONLY_STEP, run.home
        for p in run.parts:
            p.keeper = self.parameter

    def __reduce__(self):
        raise WrongInput(
            f"the {self.parameter.name} is cut from vectors of this rank, and cannot be copied or "
            "pickled, nor the Zero or Hybrid of it, nor its layers; copy the arrays of its state()"
        )


def load_shards(
    shards: list[LayerShard], named: dict[str, nn.Parameter], state: dict[str, Array]
) -> None:
    """Copy arrays by name, as `cast_state` returns them, into the runs and their shards.

    named  all parameters, also those that are frozen and in no shard
    """
    check_flat(named.values(), [s.whole for s in shards])
    left = dict(state)
    for s in shards:
        for p, part in s.run.parts.items():
            s.run.data[part] = left.pop(p.name).reshape(-1)
            p.note_load()
        s.parameter.data[...] = s.run.data[s.own]
    for name, array in left.items():
        named[name].load(array)


@contextmanager
def unlocked(
    shards: list[LayerShard], parameters: Iterable[nn.Parameter], optimizer: AnyOptimizer
) -> Iterator[None]:
    """Let this optimizer, which must have all these shards, update them meanwhile.

    parameters  all of this rank, also those that are frozen and in no shard
    """
    check_flat(parameters, [s.whole for s in shards])
    if missing := {s.parameter for s in shards} - set(optimizer.parameters):
        raise WrongInput(
            f"the optimizer lacks the {missing.pop().name}; make it with parameters() of the Zero "
            "or Hybrid, not with model.parameters()"
        )
    for s in shards:
        s.part.locked = None
    try:
        yield
    finally:
        for s in shards:
            s.part.locked = ONLY_STEP
    for s in shards:
        s.whole.changed(s.parameter.updated)  # an optimizer that follows others' changes knows it
