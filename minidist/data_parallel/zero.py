"""ZeRO: data parallelism in which every rank keeps a different part, in three stages.

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (SC 2020),
sections 5 (what is cut) and 7 (what it moves). Letters: N ranks, r this one, S bytes of parameters,
m micro-batches. Each layer's flat vector is cut into N parts, as equal as can be; the r-th part,
its gradient and its optimizer state are rank r's shard.

    stage   kept whole              kept 1/N            bytes from each rank per step
    0       W, dW, Adam's moments                       2 S (N-1)/N        (all_reduce)
    1       W, dW                   moments             2 S (N-1)/N
    2       W                       dW, moments         (m + 1) S (N-1)/N
    3                               W, dW, moments      3 m S (N-1)/N

A step: a reduce_scatter gives every rank the sum of its part of the gradient; its optimizer updates
its part of the weights; an all_gather gives every rank the new weights. The two collectives move as
much as one all_reduce.

    stage 2   A layer's gradient is reduced as soon as backward leaves the layer; the next layer
              then writes its gradient into the same memory.
    stage 3   A layer's weights are gathered just before they are used, in forward and again in
              backward, into two buffers in turn: one is filled while the other is used.

Below are the stages, `Copies` (0), `ShardedCopies` (1) and `ShardedLayers` (2, 3), for whatever
ranks have copies of: a whole model (`Zero`), or stages, parts and experts on a mesh (`Hybrid`). The
parts of a layer, and what gathers them, are in zero_layers.py.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.backend import Array
from minidist.comm import Group
from minidist.data_parallel.hierarchical_zero import two_levels
from minidist.data_parallel.quantized_gather import QuantizedGather
from minidist.data_parallel.zero_layers import (
    Gatherer,
    LayerShard,
    ZeroLayer,
    as_vector,
    bytes_of,
    gather_whole,
    load_shards,
    shared_buffers,
    unlocked,
)
from minidist.errors import WrongInput
from minidist.nn.flat_parameters import (
    FlatParameters,
    FlatSlice,
    check_flat,
    flat_slices,
    strays,
)
from minidist.nn.module import cast_state
from minidist.parallel import (
    check_balance,
    check_replicas,
    check_statistics,
    sum_gradients,
    summed_ranks,
)
from minidist.parallel.trainer import AllHeld, AnyOptimizer, Trainer

Runs = list[tuple[FlatSlice, Group]]  # elements, and the ranks that have copies of them
Held = Callable[[], list[nn.Parameter]]  # all parameters of this rank


class Copies(AllHeld):
    """Stage 0: every rank keeps the whole sum and updates all that it holds."""

    def __init__(self, runs: Runs, held: Held):
        super().__init__(held)
        self.runs = runs
        self.groups: list[Group] = []

    def sum_gradients(self, vectors: Collection[FlatParameters]) -> None:
        """Sum over the ranks what is in these flat vectors' gradients."""
        for run, group in self.runs:
            if run.home not in vectors:
                continue
            ranks = {p: summed_ranks(p, group) for p in run.parts}
            group.all_reduce(run.gradient, out=run.gradient, label="copies")
            for p, over in ranks.items():
                p.grad, p.summed_over = p.grad_buffer, over

    def counted_here(self, parameters: list[nn.Parameter]) -> list[Array]:
        """Return the parts of these gradients that this rank counts, so that each counts once."""
        firsts = {p for run, group in self.runs if group.rank == 0 for p in run.parts}
        return [p.grad for p in parameters if p in firsts]

    def gradients(self) -> dict[str, Array]:
        """Return the sums by name, of all that this rank holds."""
        return {p.name: p.grad for run, _ in self.runs for p in run.parts}


class ShardedCopies(AllHeld):
    """Stage 1: every rank keeps a part of the sum, updates it, and gets the others' new weights.

    shards   how many neighbours among those with copies share one; None: all (hierarchical_zero.py)
    groups   those that it made
    between  {ranks that share a copy: those that have this rank's shard of the other copies}
    buffers  what layers share: the gradient's, two for weights (shared_buffers); here none
    """

    stage = 1
    buffers: Sequence[Array] = ()

    def __init__(self, runs: Runs, held: Held, shards: int | None = None):
        super().__init__(held)
        every = dict.fromkeys(group for _, group in runs)
        levels = {} if shards is None else {group: two_levels(group, shards) for group in every}
        self.groups = [level for both in levels.values() for level in both]
        self.between = dict(levels.values())
        self.shards: list[LayerShard] = []
        for run, group in runs:
            first = next(iter(run.parts))  # ranks of a group have the same runs, in any number
            inside, _ = levels.get(group, (group, None))
            self.shards.append(LayerShard(run, f"shard from {first.name} on", inside))
            self.keep(self.shards[-1])

    def keep(self, shard: LayerShard) -> None:
        """Let a shard be elements of the whole vectors, which this rank keeps."""
        run, elements = shard.run, shard.elements
        shard.part.bind(run.data[elements], run.gradient[elements])

    def parameters(self) -> list[nn.Parameter]:
        """Return the shards, which this rank's optimizer updates."""
        return [s.parameter for s in self.shards]

    def sum_gradients(self, vectors: Collection[FlatParameters]) -> None:
        """Add its part of the sum to each shard of these vectors; drop the whole gradients."""
        shards = [s for s in self.shards if s.whole in vectors]
        self.scatter(shards)
        self.sum_copies(shards)

    def end_backward(self, last: bool) -> None:
        """End the backward of a micro-batch: whole gradients add up until the last one."""
        if last:
            self.sum_gradients({s.whole for s in self.shards})

    def scatter(self, shards: list[LayerShard]) -> None:
        """Add its part of the sum over the ranks that share a copy to each shard."""
        for flat in dict.fromkeys(s.whole for s in shards):
            flat.collect_gradients()
        for s in shards:
            piece = s.group.reduce_scatter(s.run.gradient, label=s.parameter.name)
            s.parameter.accumulate(piece)
            for p in s.run.parts:
                p.grad = None

    def sum_copies(self, shards: list[LayerShard]) -> None:
        """Add up the shards' gradients over the copies: the second hop, after all micro-batches.

        ValueError if they have been added up in this step already.
        """
        for s in shards:
            if s.group in self.between and self.between[s.group].size > 1:
                sum_gradients([s.parameter], self.between[s.group])

    def counted_here(self, parameters: list[nn.Parameter]) -> list[Array]:
        """Return the parts of these gradients that this rank counts, so that each counts once."""
        pieces, counted = [], set(parameters)
        for s, grad in zip(self.shards, self.summed(), strict=True):
            is_first = s.group not in self.between or self.between[s.group].rank == 0
            begin = s.elements.start
            for p, part in s.run.parts.items():
                if is_first and p in counted:
                    pieces.append(grad[max(0, part.start - begin) : max(0, part.stop - begin)])
        return pieces

    def drop(self) -> None:
        for s in self.shards:
            s.parameter.grad = None

    def step(self, optimizer: AnyOptimizer) -> None:
        """Update this rank's shards; give every rank the new weights."""
        with unlocked(self.shards, self.held(), optimizer):
            self.update_shards(optimizer)

    def update_shards(self, optimizer: AnyOptimizer) -> None:
        """Do what `step` does, once it has checked the optimizer and unlocked the shards."""
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

    def load(self, model: nn.Module, state: dict[str, np.ndarray]) -> None:
        """Copy arrays by name into the parameters and, where these are apart, into the shards."""
        named = model.named_parameters()
        load_shards(self.shards, named, cast_state(named, state))

    def gathered(self, arrays: list[Array]) -> dict[str, Array]:
        """Return by name what the ranks hold in these arrays, one for each shard."""
        named: dict[str, Array] = {}
        for s, mine in zip(self.shards, arrays, strict=True):
            run = s.group.all_gather(mine, label=s.parameter.name)
            named |= {p.name: run[part].reshape(p.shape) for p, part in s.run.parts.items()}
        return named

    def summed(self) -> list[Array]:
        """Return the shards' gradients; ValueError if one has none yet."""
        grads = [s.parameter.grad for s in self.shards if s.parameter.grad is not None]
        if len(grads) < len(self.shards):
            raise WrongInput(
                "no gradient has been summed; call backward of the Zero or Hybrid first"
            )
        return grads


class ShardedLayers(ShardedCopies):
    """Stages 2 and 3: a rank keeps its shard of gradients, and of weights; a layer's come and go.

    Forward and backward of several micro-batches, and of several chunks of layers, come in any
    order, the same on all ranks that share copies; so may two passes in one loss:

        gradient   all layers write theirs into one buffer. So the layer that has it is summed
                   before the next one begins its backward, of whatever pass, and at the end
        weights    stage 3 gathers a layer's before each of its passes, into two buffers in turn.
                   The graph keeps views of the buffers, which are valid again once backward has
                   gathered the weights

    chunks    the layers of each of this rank's chunks, which are wrapped in place
    block     in stage 3: how many weights share a scale, see `Zero`
    buffered  the layer whose gradient is in the buffer, or None
    """

    def __init__(
        self,
        runs: Runs,
        held: Held,
        chunks: list[list[nn.Module]],
        stage: int,
        shards: int | None = None,
        block: int | None = None,
    ):
        self.stage = stage
        self.buffered: int | None = None
        flats = [layer.home for layers in chunks for layer in layers]
        self.buffers = shared_buffers(flats, stage)
        super().__init__(runs, held, shards)
        self.of_layer = [[s for s in self.shards if s.whole is flat] for flat in flats]
        self.gatherer: Gatherer | None = None
        if stage == 3 and self.shards:
            apart = {group: group.split(0) for group in dict.fromkeys(s.group for s in self.shards)}
            self.groups += apart.values()
            fill = gather_whole if block is None else QuantizedGather(block)
            self.gatherer = Gatherer(self.of_layer, apart, fill)
            self.leave_to_shards(flats)
        self.chunk_of: list[range] = []  # of each layer: the numbers of its chunk's
        for layers in chunks:
            numbers = range(len(self.chunk_of), len(self.chunk_of) + len(layers))
            self.chunk_of += [numbers] * len(layers)
            hooks = self.before_forward, self.before_backward
            layers[:] = [ZeroLayer(x, k, *hooks) for k, x in zip(numbers, layers, strict=True)]

    def keep(self, shard: LayerShard) -> None:
        """Let a shard have its own gradient, and in stage 3 its own weights."""
        if self.stage == 2:
            shard.part.bind(shard.run.data[shard.elements])

    def leave_to_shards(self, flats: list[FlatParameters]) -> None:
        """Let all layers share two buffers for their weights: neighbours use them in turn."""
        for k, flat in enumerate(flats):
            flat.bind(as_vector(self.buffers[1 + k % 2], flat.vector))
            for p in flat.parameters:
                p.placement.elsewhere = (
                    "each rank keeps its shard of it; use zero.state() and zero.load_state(state), "
                    "or hybrid.state() and hybrid.load_state(state)"
                )

    def before_forward(self, k: int) -> None:
        self.need(k, k + 1)

    def before_backward(self, k: int) -> None:
        self.flush()
        self.buffered = k
        self.need(k, k - 1)

    def need(self, k: int, then: int) -> None:
        """Wait for layer k's weights; begin to gather layer `then`'s, if it is in k's chunk.

        A layer does not know which chunk runs next.
        """
        if self.gatherer is not None:
            self.gatherer.need(k, then if then in self.chunk_of[k] else -1)

    def flush(self) -> None:
        """Scatter the gradient that is in the buffer: the same order on all ranks of a stage."""
        if self.buffered is not None:
            self.scatter(self.of_layer[self.buffered])
            self.buffered = None

    def end_backward(self, last: bool) -> None:
        """Scatter the first layer's gradient; end a batch with zeros for what no pass has used."""
        self.flush()
        if last:
            self.scatter([s for s in self.shards if s.parameter.grad is None])
            self.sum_copies(self.shards)

    def drop(self) -> None:
        super().drop()
        self.buffered = None

    def update_shards(self, optimizer: AnyOptimizer) -> None:
        self.forget()
        super().update_shards(optimizer)

    def load(self, model: nn.Module, state: dict[str, np.ndarray]) -> None:
        self.forget()
        super().load(model, state)

    def forget(self) -> None:
        """Wait for weights that are gathered early, which an update or a load makes old."""
        if self.gatherer is not None:
            self.gatherer.wait()

    def summed(self) -> list[Array]:
        if self.buffered is not None:
            raise WrongInput("loss.backward() does not shard gradients; use zero.accumulate(loss)")
        return super().summed()


def copies_of(
    stage: int,
    runs: Runs,
    held: Held,
    chunks: list[list[nn.Module]],
    shards: int | None = None,
    block: int | None = None,
) -> Copies | ShardedCopies:
    """Return the stage of ZeRO that sums and updates these runs; 0: whole copies."""
    if stage == 0:
        return Copies(runs, held)
    if stage == 1:
        return ShardedCopies(runs, held, shards)
    return ShardedLayers(runs, held, chunks, stage, shards, block)


class Zero(Trainer):
    """This rank's share of a model that all ranks of a group train on different examples.

        zero = Zero(model.flatten(group.empty), group, stage=2, micro_batches=M)
        optimizer = optim.AdamW(zero.parameters(), lr=3e-4)          # of this rank's shards
        zero.backward(Batch(inputs, targets))                        # M times zero.accumulate(loss)
        optimizer.clip_global_norm(1.0, zero.sum_squares)
        zero.step(optimizer)
        weights = zero.state()                                       # stage 3: not model.state()

    model   the same on every rank; flatten(group.empty) lets its vectors move without a copy.
            Stages 2 and 3 wrap each of its layers.
    stage   1, 2 or 3
    shards  how many neighbours share one copy of what is cut, by default all; the other ranks keep
            further copies, and sum over them with a step's last micro-batch (hierarchical_zero.py)
    block   in stage 3: weights travel as int8, and this many share a scale (quantized_gather.py)
    check_weights
            whether the ranks first compare their weights (see check_same_weights)
    micro_batches
            of each rank's share of a batch, for `backward`
    groups  all groups that it communicates through, each with a ledger; `inside` a copy and
            `between` copies are two of them
    peak    the most bytes of weights and gradients alive at once, whole and in shards
    """

    copies: ShardedCopies

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        stage: int = 1,
        shards: int | None = None,
        check_weights: bool = True,
        micro_batches: int = 1,
        block: int | None = None,
    ):
        tied = tied_between_layers(model)
        check_stage(model, stage, tied, block)
        same = check_replicas(model, group, check_weights, micro_batches=micro_batches)
        super().__init__(model, group, check_group=same, micro_batches=micro_batches)
        self.stage = stage
        # what another strategy has split counts, too
        self.split = [p.name for p in model.parameters() if p.placement.spread]
        self.peak = 0
        runs = flat_slices([p for flat in flat_vectors(model) for p in flat.parameters])
        k = group.size if shards is None else shards
        copies = copies_of(
            stage, [(run, group) for run in runs], model.parameters, [model.layers], k, block
        )
        assert isinstance(copies, ShardedCopies)  # or check_stage has refused it
        self.copies = copies
        self.shards = copies.shards
        if not runs:  # all is frozen: nothing is cut, and `sum_squares` is still over these groups
            copies.groups = [*two_levels(group, k)]
        self.inside, self.between, *_ = copies.groups
        if stage > 1:
            for p in tied:
                p.grad_buffer = None  # complete only when the first of its layers is

    @property
    def groups(self) -> list[Group]:
        return [*self.copies.groups, self.loss_group]

    def accumulate(self, loss: Tensor, last: bool = True) -> None:
        """Add a micro-batch's gradient, summed over the ranks, to the shards.

        last  whether this is the step's last micro-batch; stage 1 sums whole gradients until then,
              and copies of the shards are summed then; after an error begin the step again
        """
        check_flat(self.model.parameters(), [s.whole for s in self.shards])
        # again: a norm may have been set to train since the last step
        check_statistics(self.model, self.group.size, self.m)
        check_balance(self.model, self.group.size)
        if self.batches.broken and not self.batches.open:
            self.copies.drop()
        if self.stage == 1 and any(s.parameter.grad is not None for s in self.shards):
            raise WrongInput(
                "this step's gradient is reduced already; "
                "pass last=False for all micro-batches but the last"
            )
        with self.batches.batch():
            loss.backward()
            self.sample_memory()
            self.copies.end_backward(last)

    def sample_memory(self) -> None:
        """Record how many bytes of weights and gradients are alive; count shared ones once."""
        homes = [home for s in self.shards for home in (s.whole, s.part)]
        alive = [array for home in homes for array in (home.vector, home.gradient)]
        alive += [p.grad for p in self.model.parameters() if p.grad is not None]
        self.peak = max(self.peak, bytes_of([*alive, *self.copies.buffers]))

    def sum_squares(self, own: float) -> float:
        """Add up the squares of all shards; pass this to Optimizer.clip_global_norm."""
        if self.split:
            raise WrongInput(
                f"{self.split[0]} is split over other ranks too, and zero.sum_squares adds up over "
                "the shards only; use ZeRO on a whole model, or do not clip"
            )
        self.copies.summed()  # or an error
        return float(self.inside.all_reduce(np.array(own)))


def tied_between_layers(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that several layers use."""
    users = Counter(p for layer in model.layers for p in layer.parameters())
    return [p for p, layers in users.items() if layers > 1]


def flat_vectors(model: nn.Module) -> list[FlatParameters]:
    """Return each layer's flat vector, laid anew if it is not of what trains now."""
    if strays(model.parameters(), [layer.home for layer in model.layers]):
        model.flatten()
    return [layer.home for layer in model.layers]


def check_stage(
    model: nn.Module, stage: int, tied: list[nn.Parameter], block: int | None = None
) -> None:
    """Raise ValueError unless the model can be cut so."""
    if stage not in (1, 2, 3):
        raise WrongInput(f"ZeRO has the stages 1, 2 and 3, not {stage!r}")
    if stage > 1 and not isinstance(model, nn.Sequential):
        raise WrongInput(f"stage {stage} needs an nn.Sequential, not {type(model).__name__}")
    if stage < 3 and block is not None:
        raise WrongInput(f"stage {stage} gathers no weights in a pass to quantize; use stage 3")
    if stage == 3 and tied:
        raise WrongInput(
            f"{tied[0].name!r} belongs to several layers, and stage 3 keeps the weights "
            "of one layer at a time; use a model that is not tied, or stage 2"
        )
