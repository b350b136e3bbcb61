"""How examples are shuffled and dealt; a batch, and its parts for each rank and each micro-batch.

    batch = Batch(inputs, targets, seed, step, examples)
    mine = batch.share(rank, ranks)                     # neighbours; the first ranks may have more
    for part in mine.micro_batches(m):
        loss = model.loss(model(part.inputs, part), part.targets, part.total)

A part is a Batch that knows the whole one: how many targets count in all of it, which its loss is
divided by, so that gradients of parts only have to be summed; and which examples these are, so that
dropout drops the same elements wherever an example is computed. Every rank shuffles and deals the
same global indices in the same way, and keeps its own share.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, count, repeat
from typing import Any

import numpy as np

from minidist.autograd import Tensor
from minidist.autograd.losses import IGNORED, counted
from minidist.backend import Array
from minidist.errors import WrongInput
from minidist.rng import Randomness, generator


def example_indices(inputs: Tensor | Array, targets: Array, examples=None) -> np.ndarray:
    """Return the examples' indices, by default 0, 1, ...; all three have a row per example."""
    for array, what in ((inputs, "inputs"), (targets, "targets")):
        if not getattr(array, "shape", ()):
            kind = type(array).__name__
            raise WrongInput(f"{what} are an array with a row per example, not {kind}")
    if len(inputs) != len(targets):
        raise WrongInput(f"{len(inputs)} inputs and {len(targets)} targets: they must agree")
    examples = np.arange(len(inputs)) if examples is None else np.asarray(examples)
    if examples.shape != (len(inputs),):
        raise WrongInput(
            f"{len(inputs)} inputs and indices of examples of shape {list(examples.shape)}: "
            "give one number per input"
        )
    return examples


def shard(examples: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Return this rank's part, neighbours; sizes differ by at most one, larger first, maybe 0."""
    return np.array_split(examples, size)[rank]


@dataclass(frozen=True)
class Share:
    """One rank's part of one batch.

    micro_batches  global example indices, one array each, perhaps empty
    total          number of examples in the whole batch, over all ranks and micro-batches
    """

    micro_batches: list[np.ndarray]
    total: int

    @property
    def examples(self) -> np.ndarray:
        return np.concatenate(self.micro_batches)


@dataclass(frozen=True)
class Sampler:
    """Deal `examples` indices in batches of `batch`; an epoch's last batch has what is left.

    Each epoch is a permutation drawn from (seed, epoch), so over all ranks and micro-batches every
    example comes exactly once per epoch, whatever `size` and `micro_batches` are.

    shuffle  False: every epoch has the order 0, 1, ...
    """

    examples: int
    batch: int
    seed: int = 0
    rank: int = 0
    size: int = 1
    micro_batches: int = 1
    shuffle: bool = True

    def __post_init__(self):
        if min(self.examples, self.batch, self.size, self.micro_batches) < 1:
            raise WrongInput(f"{self}: examples, batch, size and micro_batches must be 1 or more")
        if not 0 <= self.rank < self.size:
            raise WrongInput(
                f"rank {self.rank} is no rank of {self.size}; use 0 to {self.size - 1}"
            )

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return -(-self.examples // self.batch)

    def epoch(self, number: int, done: int = 0) -> Iterator[Share]:
        """Yield this rank's share of each batch of one epoch, after its first `done` examples."""
        order = np.arange(self.examples)
        if self.shuffle:
            order = generator(self.seed, f"epoch {number}").permutation(order)
        for start in range(done, self.examples, self.batch):
            batch = order[start : start + self.batch]
            mine = shard(batch, self.rank, self.size)
            yield Share(
                [shard(mine, m, self.micro_batches) for m in range(self.micro_batches)], len(batch)
            )

    def __iter__(self) -> Iterator[Share]:
        """Yield shares without end, epoch after epoch."""
        return self.after(0)

    def after(self, batches: int) -> Iterator[Share]:
        """Yield what follows the first `batches` batches, all of this size."""
        number, begun = divmod(batches, len(self))
        return self.after_examples(number * self.examples + begun * self.batch)

    def after_examples(self, done: int) -> Iterator[Share]:
        """Yield what follows the first `done` examples of all epochs, whoever had them.

        The rest of their epoch is dealt first, in batches of this size from there on; then epoch
        after epoch, without end. Epochs that are over are not drawn. ValueError if done < 0.
        """
        if done < 0:
            raise WrongInput(f"cannot go on after {done} examples; use 0 or more")
        number, begun = divmod(done, self.examples)
        starts = chain([begun], repeat(0))
        return chain.from_iterable(map(self.epoch, count(number), starts))


@dataclass(frozen=True, eq=False, init=False, kw_only=True)
class Batch(Randomness):
    """What a step learns from, or a part of it, with what layers need to know of the whole batch.

    inputs       tokens or floats [B, ...], an array or a tensor
    targets      what the loss takes, [B, ...]
    seed, step   of the dropout masks; seed None: no masks, in an evaluation
    examples     global indices of the examples, [B]; by default 0, 1, ...
    cut          (tensor, rows): what a part's inputs are cut from, if they are a tensor
    of_the_batch the other fields of Randomness. By default `batch` and `total` are this one's, and
                 where each position of a whole sequence has a target, `counted` are the positions
                 whose targets count
    """

    inputs: Tensor | Array
    targets: Array
    total: float  # a Batch always knows it
    cut: tuple[Tensor, np.ndarray] | None

    def __init__(
        self,
        inputs: Tensor | Array,
        targets: Array,
        seed: int | None = 0,
        step: int = 0,
        examples: np.ndarray | None = None,
        loss_scale: float = 1.0,
        cut: tuple[Tensor, np.ndarray] | None = None,
        **of_the_batch: Any,
    ):
        vars(self).update(inputs=inputs, targets=targets, cut=cut)  # it is frozen
        examples = example_indices(inputs, targets, examples)
        fields = {name: value for name, value in of_the_batch.items() if value is not None}
        fields.setdefault("batch", len(examples))
        if "total" not in fields:
            fields["total"] = counted(targets)
        position_each = targets.dtype.kind in "iu" and targets.ndim == 2
        if position_each and not fields.keys() & {"counted", "positions"}:
            fields["counted"] = targets != IGNORED
        super().__init__(seed, step, examples, loss_scale=loss_scale, **fields)

    def __len__(self) -> int:
        return len(self.examples)

    def rows(self, rows: np.ndarray) -> "Batch":
        """Return the part with these rows."""
        part: dict[str, Any] = {
            name: None if (array := getattr(self, name)) is None else array[rows]
            for name in ("targets", "examples", "documents", "counted")
        }
        if isinstance(self.inputs, Tensor):
            # Parts of a part share no graph, which the first one's backward would free.
            whole, at = self.cut or (self.inputs, np.arange(len(self)))
            return replace(self, inputs=whole[at[rows]], cut=(whole, at[rows]), **part)
        return replace(self, inputs=self.inputs[rows], **part)

    def share(self, rank: int, ranks: int) -> "Batch":
        """Return one rank's part, as even as can be, perhaps empty."""
        return self.rows(shard(np.arange(len(self)), rank, ranks))

    def micro_batches(self, m: int) -> list["Batch"]:
        """Cut it into m parts, as even as can be; if m > B some are empty."""
        if m < 1:
            raise WrongInput(f"a batch is cut into 1 micro-batch or more, not {m}")
        return [self.share(i, m) for i in range(m)]
