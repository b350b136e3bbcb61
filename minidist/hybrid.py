"""Data x pipeline x context x tensor, experts within data: a Transformer over a mesh of ranks.

    mesh = Mesh(group, dp=2, pp=2, cp=2, tp=2)           # tp fastest: the ranks that talk most
    hybrid = Hybrid(model, mesh, "1f1b", micro_batches=4, ep=2, zero=1)
    optimizer = optim.AdamW(hybrid.parameters(), lr=3e-4)
    loss = hybrid.backward(Batch(inputs, targets))       # the whole batch's, over all ranks
    optimizer.clip_global_norm(1.0, hybrid.sum_squares)
    hybrid.step(optimizer)

Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM
(SC 2021), section 3. The axes are independent of each other; only their sums must be combined:

    dp   examples of the batch: gradients are summed over dp, once; the sum of a stage's begins when
         its last backward ends, beside the backward of the rank's other chunks (reduction.py)
    pp   layers: stages hold different parameters; a tied one is summed between its two stages
    cp   positions of every example: gradients are summed over cp, in one sum with dp
    tp   matrices: a rank holds a part of each; a parameter that all ranks hold has the same
         gradient on all of them (or, with the sequence split, a part of it, summed over tp)
    ep   experts: runs of ep neighbours on dp hold different ones, and rows travel between them; an
         expert's gradient is summed over the ranks that hold it too, dp/ep x cp

cp: context_parallel/, ep: expert_parallel/ have their papers. The loss is divided by the targets
that count in the whole batch, so no sum needs a factor. What ranks have copies of is updated on
each of them, or in shards: ZeRO (data_parallel/zero.py).
"""

from functools import partial
from numbers import Integral

import numpy as np

from minidist import nn
from minidist.backend import Array, to_host
from minidist.comm import Group, Mesh
from minidist.context_parallel import Cut, axes_of, context_parallel, share_of_positions, zigzag
from minidist.data_parallel.zero import (
    Copies,
    Runs,
    ShardedCopies,
    ShardedLayers,
    copies_of,
    tied_between_layers,
)
from minidist.errors import WrongInput
from minidist.expert_parallel import expert_parameters, keep_own_experts
from minidist.nn.datasets import Batch
from minidist.nn.flat_parameters import flat_slices
from minidist.parallel import (
    check_replicas,
    from_holders,
    shapes_of,
    share_scales_of_stage,
    sum_loads,
    sum_squares_over,
)
from minidist.parallel.trainer import Trainer
from minidist.pipeline_parallel import Pipeline
from minidist.pipeline_parallel.actions import Action, BackwardInput
from minidist.tensor_parallel import ParallelTransformer, counted_here, unsplit, vocab_parallel
from minidist.tensor_parallel.sequence_parallel import all_reduce_partial, sequence_parallel


class Hybrid(Trainer):
    """This rank's part of a Transformer on a mesh with the axes dp, pp, tp and, if asked for, cp.

    model          a single-device Transformer, the same on every rank; its layers are taken over.
                   Or a Seq2Seq: it goes on dp x pp x tp, and its sequences stay whole
    schedule, micro_batches, options
                   as for Pipeline; each dp rank cuts its share of the batch into micro_batches
    split_sequence sequence parallelism over tp (see tensor_parallel/sequence_parallel.py)
    ep             ranks that hold different experts: runs of ep neighbours on the axis dp
    dispatch       over ep: "rows" or "positions" travel (see keep_own_experts)
    zero           what ranks with the same parameters share: 1: the optimizer's state, 2: also the
                   gradients, 3: also the weights (ZeRO's stages)
    shards         how many neighbours of dp x cp share a copy; None: all (hierarchical_zero.py)
    attention, positions, ulysses
                   over cp: "ring", "gathered" or "ulysses", the cut of the sequence, and how many
                   neighbours exchange heads inside a ring (context_parallel/usp.py)
    check_weights  whether the ranks first compare their weights (see check_same_weights)
    """

    copies: Copies | ShardedCopies

    def __init__(
        self,
        model: nn.Transformer | nn.Seq2Seq,
        mesh: Mesh,
        schedule: str | list[list[Action]] = "1f1b",
        micro_batches: int | None = None,
        split_sequence: bool = False,
        ep: int = 1,
        dispatch: str = "rows",
        zero: int = 0,
        shards: int | None = None,
        attention: str = "ring",
        positions: Cut = zigzag,
        ulysses: int = 1,
        check_weights: bool = True,
        **options,
    ):
        check_axes(mesh, model, split_sequence, ep)
        if zero != 0 or shards is not None:
            check_zero(zero, shards, model, ep, split_sequence, options.get("recompute", False))
        self.scales = share_scales_of_stage(model, mesh)
        same = check_replicas(model, mesh.group, check_weights, loads=True)
        shapes = shapes_of(model)
        self.mesh, self.split_sequence, self.positions = mesh, split_sequence, positions
        self.cp, self.replicas = mesh.over("cp"), mesh.over("dp", "cp")
        # Sums run in a second thread, and a group serves one thread at a time: split(0) makes the
        # same ranks another group.
        if self.replicas is self.cp and self.cp.size > 1:
            self.replicas = self.replicas.split(0)
        self.tp_sums = mesh.tp.split(0) if split_sequence else mesh.tp
        self.expert_group = mesh.dp.split(mesh.dp.rank // ep)
        self.same_experts = self.replicas if ep == 1 else self.replicas.split(mesh.dp.rank % ep)
        self.experts = [p.name for p in expert_parameters(model)]
        self.context_axes = axes_of(self.cp, ulysses) if ulysses != 1 else None
        parts = self.split(model, attention, dispatch)
        self.holders = parts.holders
        loss = partial(vocab_parallel.cross_entropy, group=mesh.tp, vocab=parts.vocab)
        options |= {"loss": loss, "check_weights": False}
        options["sums"] = self.sum_gradients if zero < 2 else None
        self.pipeline = Pipeline(parts, mesh.pp, schedule, micro_batches, **options)
        if zero > 1:
            check_whole_backward(self.pipeline.programs, zero)
        super().__init__(self.pipeline.model, mesh.group, shapes, same, self.pipeline.m)
        self.batches = self.pipeline.batches
        self.batches.drop = self.drop
        runs, chunks = self.copied_slices(), [stage.layers for stage in self.pipeline.stages]
        self.copies = copies_of(zero, runs, self.pipeline.parameters, chunks, shards)
        for p in self.parameters():
            p.placement.spread = "a mesh: pass sum_squares=hybrid.sum_squares"

    def split(
        self, model: nn.Transformer | nn.Seq2Seq, attention: str, dispatch: str
    ) -> ParallelTransformer:
        """Return this rank's experts, matrices and attention, of all layers."""
        if self.expert_group.size > 1:
            keep_own_experts(model, self.expert_group, dispatch)
        cut = sequence_parallel if self.split_sequence else ParallelTransformer
        parts = cut(model, self.mesh.tp, check_weights=False)
        if self.cp.size > 1:
            context_parallel(parts, self.cp, attention, self.positions, self.context_axes)
        return parts

    def copied_slices(self) -> Runs:
        """Return slices of this rank's flat vectors, each with the ranks that have copies of it."""
        runs, experts = [], set(self.experts)
        for layer in self.model.layers:
            for group, is_expert in (self.replicas, False), (self.same_experts, True):
                copied = [p for p in layer.home.parameters if (p.name in experts) == is_expert]
                runs += [(run, group) for run in flat_slices(copied)]
        return runs

    @property
    def groups(self) -> list[Group]:
        """All groups that it communicates through, each with a ledger."""
        groups = [getattr(self.mesh, name) for name in self.mesh.axes]
        groups += [self.tp_sums, self.replicas, self.expert_group, self.same_experts]
        groups += [*(self.context_axes or ()), *([self.holders] if self.holders else [])]
        groups += self.pipeline.shared.values()
        groups += self.copies.groups + self.scales
        return list(dict.fromkeys(groups))

    def share(self, batch: Batch) -> Batch:
        """Return this rank's examples of a batch, and of these its positions."""
        mine = batch.share(self.mesh.dp.rank, self.mesh.dp.size)
        return share_of_positions(mine, self.cp, self.positions)

    def total(self, loss: Array) -> float:
        """Return the whole batch's loss on every rank, given what the pipelines return."""
        return float(self.replicas.all_reduce(self.mesh.pp.all_reduce(np.array(loss))))

    def backward(self, batch: Batch) -> float:
        """Compute the whole batch's gradient, in this rank's parameters; return the whole loss.

        The parameters must not have a gradient before. Every rank gets tokens [B, T] of the batch.
        """
        if not self.batches.broken and any(p.grad is not None for p in self.parameters()):
            raise WrongInput(
                "the gradients of the last batch are sums over ranks, and would be summed again; "
                "call zero_grad() first, or pass both batches at once, as micro_batches="
            )
        loss = self.pipeline.run(self.micro_batches(batch))
        if isinstance(self.copies, ShardedLayers):  # nothing was summed during the pipeline
            self.copies.end_backward(last=True)
        sum_loads(self.model, self.replicas)
        return self.total(loss)

    def run_forward(self, batch: list[Batch]) -> Array:
        return self.pipeline.run_forward(batch)

    def sum_gradients(self, layers: list[nn.Module]) -> None:  # type: ignore[override]  # of these layers, not of all
        """Sum these layers' gradients: over tp, if the sequence is split, then over dp and cp.

        The pipeline calls it when they are complete, in a second thread (see reduction.py).
        """
        for layer in layers:
            if self.split_sequence:
                all_reduce_partial(layer, self.tp_sums)
            layer.home.collect_gradients()
        self.copies.sum_gradients({layer.home for layer in layers})

    def sum_squares(self, own: float | None = None) -> float:
        """Return the sum of the squares of the whole gradient: every parameter counts once.

        What all tp ranks hold counts on the first of them, a tied parameter in its first stage.
        own  from Optimizer.clip_global_norm, this rank's own sum, used only as a check
        """
        once = counted_here(self.pipeline.counted_here(), self.mesh.tp)
        mine, axes = self.copies.counted_here(once), (self.mesh.tp, self.mesh.pp, self.replicas)
        return sum_squares_over(mine, self.parameters(), own, *axes)

    def whole(self, own: dict[str, Array]) -> dict[str, np.ndarray]:
        """Return the whole arrays of all parameters, given the parts that this rank holds."""
        named = self.named_parameters()
        mine = {n: to_host(unsplit(x, named[n], self.mesh.tp)) for n, x in own.items()}
        mine |= from_holders(mine, self.experts, self.expert_group)
        return from_holders(mine, self.shapes, self.mesh.pp)


def check_axes(mesh: Mesh, model: nn.Module, split_sequence: bool, ep: int) -> None:
    """Raise ValueError if the mesh has other axes than Hybrid, or axes that do not go together."""
    if missing := {"dp", "pp", "tp"} - set(mesh.axes):
        raise WrongInput(f"the mesh has no axis {sorted(missing)[0]}; give it size 1")
    if unknown := set(mesh.axes) - {"dp", "pp", "cp", "tp"}:
        raise WrongInput(
            f"Hybrid has no axis {sorted(unknown)[0]}; make the mesh of dp, pp, cp and tp, "
            "and give ep as an argument"
        )
    vocab_parallel.check_loss(model)
    if split_sequence and mesh.axes.get("cp", 1) > 1:
        raise WrongInput(
            f"cp={mesh.axes['cp']} cuts the sequence already; leave out split_sequence, or use cp=1"
        )
    if not isinstance(ep, Integral) or ep < 1 or mesh.dp.size % ep:
        raise WrongInput(f"ep={ep!r} does not divide dp={mesh.dp.size}; use a divisor of it")
    if ep > 1 and not getattr(model, "experts", 0):
        raise WrongInput(f"ep={ep} needs experts; use nn.Transformer(..., experts={ep})")


def check_zero(
    zero: int, shards: int | None, model: nn.Module, ep: int, split_sequence: bool, recompute: bool
) -> None:
    """Raise ValueError for a stage of ZeRO that does not go with the rest of a Hybrid."""
    if zero not in (0, 1, 2, 3):
        raise WrongInput(f"ZeRO has the stages 1, 2 and 3, and 0 is none, not {zero!r}")
    if shards is not None and (zero == 0 or ep > 1):
        raise WrongInput(
            f"shards={shards} cuts what ZeRO shares among fewer ranks, and experts over ep={ep} "
            "have fewer already; use zero=1, 2 or 3, and ep=1"
        )
    if zero > 1 and split_sequence:
        raise WrongInput(
            f"with zero={zero} every micro-batch would also sum partial gradients over tp; use "
            "zero=1, or leave out split_sequence"
        )
    if zero > 1 and recompute:
        raise WrongInput(
            "recompute hands over the gradients of all layers of a stage at once, and "
            f"zero={zero} keeps one layer's; use zero=1, or leave out recompute"
        )
    if zero > 1 and (tied := tied_between_layers(model)):
        raise WrongInput(
            f"{tied[0].name!r} belongs to several layers, and zero={zero} on a mesh keeps the "
            "gradient of one layer at a time; use a model that is not tied, or zero=1"
        )


def check_whole_backward(programs: list[list[Action]], zero: int) -> None:
    """Raise ValueError if weights' gradients come apart from the backward that they belong to."""
    if any(isinstance(action, BackwardInput) for program in programs for action in program):
        raise WrongInput(
            f"zero={zero} sums a layer's gradient when backward leaves the layer, and this "
            "schedule computes it later; use zero=1, or 1f1b, gpipe, interleaved or looped_bfs"
        )
