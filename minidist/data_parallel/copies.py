"""Parameters that ranks have copies of: their gradients are summed, then they are updated.

Two ways, for each run W of a flat vector, of S bytes, and the N ranks that have copies of it:

    Copies          all_reduce dW;      every rank updates all of W           2 (N - 1) S bytes
    ShardedCopies   reduce_scatter dW;  a rank updates W/N;  all_gather W     2 (N - 1) S bytes

The second is ZeRO stage 1 (zero.py): an optimizer's state is kept once, not N times. Or once per
k ranks (hierarchical_zero.py). Stages 2 and 3 are in sharded_layers.py.
"""

from collections.abc import Collection

import numpy as np

from minidist.backend import Array
from minidist.comm import Group
from minidist.data_parallel.hierarchical_zero import sum_copies, two_levels
from minidist.data_parallel.layer_shard import LayerShard, unlocked
from minidist.errors import WrongInput
from minidist.nn import Module, Parameter
from minidist.nn.flat_parameters import FlatParameters, FlatSlice
from minidist.replicas import summed_ranks
from minidist.trainer import AnyOptimizer

Runs = list[tuple[FlatSlice, Group]]  # elements, and the ranks that have copies of them


class Copies:
    """Every rank keeps the whole sum and updates all that it holds."""

    def __init__(self, runs: Runs, parameters: list[Parameter]):
        self.runs, self.held = runs, parameters
        self.groups: list[Group] = []

    def parameters(self) -> list[Parameter]:
        """Return what this rank's optimizer updates."""
        return self.held

    def sum_gradients(self, vectors: Collection[FlatParameters]) -> None:
        """Sum over the ranks what is in these flat vectors' gradients."""
        for run, group in self.runs:
            if run.home not in vectors:
                continue
            ranks = {p: summed_ranks(p, group) for p in run.parts}
            group.all_reduce(run.gradient, out=run.gradient, label="copies")
            for p, over in ranks.items():
                p.grad = p.grad_buffer
                p.note_sum(over)

    def counted_here(self, parameters: list[Parameter]) -> list[Array]:
        """Return the parts of these gradients that this rank counts, so that each counts once."""
        firsts = {p for run, group in self.runs if group.rank == 0 for p in run.parts}
        return [p.grad for p in parameters if p in firsts]

    def step(self, optimizer: AnyOptimizer) -> None:
        """Update what this rank updates, and give all ranks the new weights."""
        optimizer.step()

    def gradients(self) -> dict[str, Array]:
        """Return the sums by name, of all that this rank holds."""
        return {p.name: p.grad for run, _ in self.runs for p in run.parts}

    def weights(self) -> dict[str, Array]:
        """Return by name the weights that the parameters do not have now: none."""
        return {}

    def load(self, model: Module, state: dict[str, np.ndarray]) -> None:
        model.load_state(state)


class ShardedCopies:
    """Every rank keeps a part of the sum, updates this part, and gets the others' new weights.

    shards  how many neighbours among those with copies share one; None: all (hierarchical_zero.py)
    groups  those that it made
    """

    stage = 1

    def __init__(self, runs: Runs, parameters: list[Parameter], shards: int | None = None):
        every = dict.fromkeys(group for _, group in runs)
        levels = {} if shards is None else {group: two_levels(group, shards) for group in every}
        self.groups = [level for both in levels.values() for level in both]
        self.between = dict(levels.values())  # {ranks that share a copy: those with the same shard}
        self.shards, self.held = [], parameters
        for run, group in runs:
            first = next(iter(run.parts))  # ranks of a group have the same runs, in any number
            inside, _ = levels.get(group, (group, None))
            shard = LayerShard(run, f"shard from {first.name} on", inside)
            self.keep(shard)
            shard.whole.locked = shard.part.locked
            self.shards.append(shard)

    def keep(self, shard: LayerShard) -> None:
        """Let a shard be elements of the whole vectors, which this rank keeps."""
        shard.part.bind(shard.run.data[shard.own], shard.run.gradient[shard.own])

    def parameters(self) -> list[Parameter]:
        """Return what this rank's optimizer updates."""
        return [s.parameter for s in self.shards]

    def sum_gradients(self, vectors: Collection[FlatParameters]) -> None:
        """Add its part of the sum to each shard of these vectors; drop the whole gradients."""
        these = [s for s in self.shards if s.whole in vectors]
        self.scatter(these)
        self.sum_copies(these)

    def scatter(self, shards: list[LayerShard]) -> None:
        """Add its part of the sum over the ranks that share a copy to each shard."""
        for s in shards:
            piece = s.group.reduce_scatter(s.run.gradient, label=s.parameter.name)
            s.parameter.accumulate(piece)
            for p in s.run.parts:
                p.grad = None

    def sum_copies(self, shards: list[LayerShard]) -> None:
        """Add up the shards' gradients over the ranks with other copies, if there are any."""
        for s in shards:
            if s.group in self.between:
                sum_copies([s], self.between[s.group])

    def counted_here(self, parameters: list[Parameter]) -> list[Array]:
        """Return the parts of these gradients that this rank counts, so that each counts once."""
        pieces, counted = [], set(parameters)
        for s, grad in zip(self.shards, self.summed(), strict=True):
            first = s.group not in self.between or self.between[s.group].rank == 0
            for p, part in s.run.parts.items():
                if first and p in counted:
                    start, stop = (max(0, end - s.own.start) for end in (part.start, part.stop))
                    pieces.append(grad[start:stop])
        return pieces

    def step(self, optimizer: AnyOptimizer) -> None:
        with unlocked(self.shards, self.held, optimizer):
            self.summed()  # or an error
            optimizer.step()
            if self.stage < 3:
                for s in self.shards:
                    s.group.all_gather(s.parameter.data, out=s.run.data, label=s.parameter.name)

    def gradients(self) -> dict[str, Array]:
        """Return the sums by name, of all that this rank holds; they are gathered for it."""
        return self.gathered(self.summed())

    def weights(self) -> dict[str, Array]:
        """Return by name the weights that the parameters do not have now, gathered."""
        return {} if self.stage < 3 else self.gathered([s.parameter.data for s in self.shards])

    def load(self, model: Module, state: dict[str, np.ndarray]) -> None:
        model.load_state(state)

    def gathered(self, arrays: list[Array]) -> dict[str, Array]:
        """Return by name what the ranks hold in these arrays, one for each shard."""
        found: dict[str, Array] = {}
        for s, own in zip(self.shards, arrays, strict=True):
            whole = s.group.all_gather(own, label=s.parameter.name)
            found |= {p.name: whole[part].reshape(p.shape) for p, part in s.run.parts.items()}
        return found

    def summed(self) -> list[Array]:
        """Return the shards' gradients; ValueError if one has none yet."""
        grads = [s.parameter.grad for s in self.shards if s.parameter.grad is not None]
        if len(grads) < len(self.shards):
            raise WrongInput("no gradient has been summed; call hybrid.backward first")
        return grads
