"""Parameters that ranks have copies of: their gradients are summed, then they are updated.

Two ways, for each run W of a flat vector, of S bytes, and the N ranks that have copies of it:

    Copies          all_reduce dW;      every rank updates all of W           2 (N - 1) S bytes
    ShardedCopies   reduce_scatter dW;  a rank updates W/N;  all_gather W     2 (N - 1) S bytes

The second is ZeRO stage 1 (zero.py): an optimizer's state is kept once, not N times.
"""

from collections.abc import Collection

from minidist.backend import Array
from minidist.comm import Group
from minidist.data_parallel.layer_shard import LayerShard, unlocked
from minidist.nn import Parameter
from minidist.nn.flat_parameters import FlatParameters, FlatSlice
from minidist.replicas import summed_ranks
from minidist.trainer import AnyOptimizer

Runs = list[tuple[FlatSlice, Group]]  # elements, and the ranks that have copies of them


class Copies:
    """Every rank keeps the whole sum and updates all that it holds."""

    def __init__(self, runs: Runs, parameters: list[Parameter]):
        self.runs, self.held = runs, parameters

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
        optimizer.step()
        optimizer.zero_grad()

    def gradients(self) -> dict[str, Array]:
        """Return the sums by name, of all that this rank holds."""
        return {p.name: p.grad for run, _ in self.runs for p in run.parts}


class ShardedCopies:
    """Every rank keeps a part of the sum, updates this part, and gets the others' new weights."""

    def __init__(self, runs: Runs, parameters: list[Parameter]):
        self.shards = []
        for run, group in runs:
            first = next(iter(run.parts))  # ranks of a group have the same runs, in any number
            shard = LayerShard(run, f"shard from {first.name} on", group)
            shard.part.bind(run.data[shard.own], run.gradient[shard.own])
            shard.whole.locked = shard.part.locked
            self.shards.append(shard)

    def parameters(self) -> list[Parameter]:
        """Return what this rank's optimizer updates."""
        return [s.parameter for s in self.shards]

    def sum_gradients(self, vectors: Collection[FlatParameters]) -> None:
        """Add its part of the sum to each shard of these vectors; drop the whole gradients."""
        for s in self.shards:
            if s.whole not in vectors:
                continue
            piece = s.group.reduce_scatter(s.run.gradient, label=s.parameter.name)
            s.parameter.accumulate(piece)
            for p in s.run.parts:
                p.grad = None

    def counted_here(self, parameters: list[Parameter]) -> list[Array]:
        """Return the parts of these gradients that this rank counts, so that each counts once."""
        pieces, counted = [], set(parameters)
        for s, grad in zip(self.shards, self.summed(), strict=True):
            for p, part in s.run.parts.items():
                if p in counted:
                    start, stop = (max(0, end - s.own.start) for end in (part.start, part.stop))
                    pieces.append(grad[start:stop])
        return pieces

    def step(self, optimizer: AnyOptimizer) -> None:
        with unlocked(self.shards, optimizer):
            self.summed()  # or an error
            optimizer.step()
            optimizer.zero_grad()
            for s in self.shards:
                s.group.all_gather(s.parameter.data, out=s.run.data, label=s.parameter.name)

    def gradients(self) -> dict[str, Array]:
        """Return the sums by name, of all that this rank holds; they are gathered for it."""
        found: dict[str, Array] = {}
        for s, grad in zip(self.shards, self.summed(), strict=True):
            whole = s.group.all_gather(grad, label=s.parameter.name)
            found |= {p.name: whole[part].reshape(p.shape) for p, part in s.run.parts.items()}
        return found

    def summed(self) -> list[Array]:
        """Return the shards' gradients; ValueError if one has none yet."""
        grads = [s.parameter.grad for s in self.shards if s.parameter.grad is not None]
        if len(grads) < len(self.shards):
            raise ValueError("no gradient has been summed; call hybrid.backward first")
        return grads
