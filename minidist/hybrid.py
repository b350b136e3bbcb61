"""Data x pipeline x tensor: a Transformer over a mesh of ranks, one code path for all meshes.

    mesh = Mesh(group, dp=2, pp=2, tp=2)                 # tp fastest: the ranks that talk most
    hybrid = Hybrid(model, mesh, "1f1b", micro_batches=4)
    optimizer = optim.AdamW(hybrid.parameters(), lr=3e-4)
    loss = hybrid.backward(inputs, targets)              # the whole batch's, over all ranks
    optimizer.clip_global_norm(1.0, hybrid.sum_squares)
    optimizer.step(); optimizer.zero_grad()

Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM
(SC 2021), section 3. The axes are independent of each other; only their sums must be combined:

    dp   examples of the batch: gradients are summed over dp, once, at the end
    pp   layers: stages hold different parameters; a tied one is summed between its two stages
    tp   matrices: a rank holds a part of each; a parameter that all ranks hold has the same
         gradient on all of them (or, with the sequence split, a part of it, summed over tp)

The loss is divided by the targets of the whole batch, so no sum needs a factor.
"""

from functools import partial

import numpy as np

from minidist import nn
from minidist.backend import Array, to_host
from minidist.comm import Mesh
from minidist.datasets import example_indices, shard
from minidist.pipeline_parallel import Pipeline
from minidist.pipeline_parallel.holders import from_holders, load_own, shapes_of
from minidist.pipeline_parallel.micro_batch import micro_batches
from minidist.replicas import check_same_weights, sum_squares_over
from minidist.tensor_parallel import ParallelTransformer, counted_here, unsplit, vocab_parallel
from minidist.tensor_parallel.sequence_parallel import all_reduce_partial, sequence_parallel


class Hybrid:
    """This rank's part of a Transformer on a mesh with the axes dp, pp and tp.

    model          a single-device Transformer, the same on every rank; its layers are taken over
    schedule, micro_batches, options
                   as for Pipeline; each dp rank cuts its share of the batch into micro_batches
    split_sequence sequence parallelism over tp (see tensor_parallel/sequence_parallel.py)
    check_weights  whether the ranks first compare their weights (see check_same_weights)
    """

    def __init__(
        self,
        model: nn.Transformer,
        mesh: Mesh,
        schedule: str = "1f1b",
        micro_batches: int = 4,
        split_sequence: bool = False,
        check_weights: bool = True,
        **options,
    ):
        if missing := {"dp", "pp", "tp"} - set(mesh.axes):
            raise ValueError(f"the mesh has no axis {sorted(missing)[0]}; give it size 1")
        self.check_group = mesh.group if check_weights else None
        if check_weights:
            check_same_weights(model, mesh.group)
        self.mesh, self.split_sequence = mesh, split_sequence
        self.shapes = shapes_of(model)
        if split_sequence:
            model = sequence_parallel(model, mesh.tp, check_weights=False)
        else:
            model = ParallelTransformer(model, mesh.tp, check_weights=False)
        loss = partial(vocab_parallel.cross_entropy, group=mesh.tp, vocab=model.vocab)
        options |= {"loss": loss, "check_weights": False}
        self.pipeline = Pipeline(model, mesh.pp, schedule, micro_batches, **options)
        for p in self.parameters():
            p.spread = "a mesh: pass sum_squares=hybrid.sum_squares"

    def parameters(self) -> list[nn.Parameter]:
        return self.pipeline.parameters()

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return self.pipeline.named_parameters()

    def backward(
        self, inputs: Array, targets: Array, seed: int = 0, step: int = 0, examples=None
    ) -> float:
        """Compute the whole batch's gradient, in this rank's parameters; return the whole loss.

        The parameters must not have a gradient before.

        inputs, targets  tokens [B, T] of the whole batch, on every rank
        examples         their global indices, [B], for dropout; by default 0, 1, ...
        """
        examples = example_indices(inputs, targets, examples)
        if any(p.grad is not None for p in self.parameters()):
            raise ValueError(
                "the gradients of the last batch are sums over ranks, and would be summed again; "
                "call zero_grad() first, or pass both batches at once, as micro_batches="
            )
        mine = shard(np.arange(len(inputs)), self.mesh.dp.rank, self.mesh.dp.size)
        batch = micro_batches(
            inputs[mine], targets[mine], self.pipeline.m, seed, step, examples[mine], targets.size
        )
        loss = self.pipeline.run(batch)
        self.sum_gradients()
        for p in self.parameters():
            p.note_sum(frozenset(self.mesh.dp.members))
        return float(self.mesh.dp.all_reduce(self.mesh.pp.all_reduce(np.array(loss))))

    def sum_gradients(self) -> None:
        """Sum what the pipeline has left: over tp, if the sequence is split, and over dp."""
        if self.split_sequence:
            all_reduce_partial(self.pipeline.model, self.mesh.tp)
        for layer in self.pipeline.model.layers:
            layer.flat.collect_gradients()
            self.mesh.dp.all_reduce(layer.flat.gradient, out=layer.flat.gradient, label="dp")
            for p in layer.flat.parameters:
                p.grad = p.grad_buffer

    def sum_squares(self, own: float | None = None) -> float:
        """Return the sum of the squares of the whole gradient: every parameter counts once.

        What all tp ranks hold counts on the first of them, a tied parameter in its first stage.
        own  from Optimizer.clip_global_norm, this rank's own sum, used only as a check
        """
        once = counted_here(self.pipeline.counted_here(), self.mesh.tp)
        return sum_squares_over(once, self.parameters(), own, self.mesh.tp, self.mesh.pp)

    def state(self) -> dict[str, np.ndarray]:
        """Return the weights of the whole model, on every rank and on the host, by name."""
        return self.whole({name: p.data for name, p in self.named_parameters().items()})

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Copy the whole model's arrays, the same on every rank, into this rank's parts."""
        load_own(self.pipeline.model, state, self.shapes, self.check_group)

    def whole(self, own: dict[str, Array]) -> dict[str, np.ndarray]:
        """Return the whole arrays of all parameters, given the parts that this rank holds."""
        named = self.named_parameters()
        mine = {n: to_host(unsplit(x, named[n], self.mesh.tp)) for n, x in own.items()}
        return from_holders(mine, self.shapes, self.mesh.pp)
