"""Random numbers that depend on global names and indices only, never on how the work is split.

A parameter is drawn from a generator named after it, so every rank draws the same array and a rank
that owns a shard keeps the same slice of it. A dropout mask is a hash of (seed, step, layer name,
example, element): every rank and every micro-batch that computes an element makes the same choice
to keep or drop it. All numbers are drawn on the host, except a mask for a GPU: the GPU computes the
same hash itself (`autograd.kernels.layers.dropout`).
"""

import hashlib
import math
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Integral

import numpy as np

from minidist.backend import Array, whole_numbers
from minidist.errors import WrongInput, check_number
from minidist.pieces import Documents, Positions


def generator(seed: int, name: str) -> np.random.Generator:
    """Return NumPy's default generator, seeded with (seed, name)."""
    check_number("a seed is a whole number from 0", seed, lambda n: n >= 0, Integral)
    return np.random.default_rng([seed, digest(name)])


def digest(*words) -> int:
    """Return a 64-bit number of some words and numbers: a key for `hash_uniform`."""
    text = "\0".join(map(str, words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def hash_uniform(key: int, counter: np.ndarray) -> np.ndarray:
    """Map uint64 counters to float64 in [0, 1) by a 64-bit mixer.

    It is the mixer of Java's SplittableRandom (Stafford's variant 13; Steele, Lea, Flood 2014).
    """
    z = counter * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


def draws_for(seed: int, step: int, name: str, elements: Array) -> Array:
    """Return a draw in [0, 1) for elements of the global array `name`, float64.

    It depends on the seed, the step, the name and the element's place in the whole array, uint64:
    whoever rounds the element, draws the same.
    """
    return hash_uniform(digest(seed, "rounding", step, name), elements)


@dataclass(frozen=True, eq=False)
class Randomness:
    """What a layer needs to know about the whole batch: pass it as `model(x, randomness)`.

    A `Batch` (nn/datasets/batch.py) is one, with its inputs and targets.

    seed, step   integers; another step gives other masks. Seed None: an evaluation, which drops
                 nothing
    examples     global index of each row of the batch, [B]: its position in the data set, on
                 whatever rank the row is
    batch        number of examples of the whole update, over all ranks and micro-batches; by
                 default those of `examples`: right for one device and one batch
    positions    the positions of the sequence that the columns of x[B, T, ...] are; None: all
    loss_scale   what multiplies the gradient that enters backward (see mixed_precision.py)
    documents    a number of each position's document, [B, T] of whole sequences: attention stays
                 within runs of equal numbers; None: an example is one document
    counted      the positions that count in the balance of experts, booleans [B, T] of whole
                 sequences: not those of padding; None: all
    total        number of them in the whole update, over all ranks and micro-batches; by default
                 the number of True in `counted`
    copies       the examples on each GPU that hashed a mask, by device number: they travel once
    """

    seed: int | None
    step: int
    examples: np.ndarray
    batch: int | None = None
    positions: Positions | None = None
    loss_scale: float = 1.0
    documents: np.ndarray | None = None
    counted: np.ndarray | None = None
    total: float | None = None
    copies: dict = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self):
        examples = whole_numbers(self.examples, "indices of examples")
        if examples.size and examples.min() < 0:
            raise WrongInput(f"indices of examples must be integers from 0, not {examples}")
        if self.documents is not None:
            numbers = whole_numbers(self.documents, "numbers of documents")
            object.__setattr__(self, "documents", numbers)
        for name, array in {"documents": self.documents, "counted": self.counted}.items():
            if array is not None and (array.ndim != 2 or len(array) != len(examples)):
                raise WrongInput(
                    f"{name} {list(array.shape)} do not fit {len(examples)} examples; "
                    f"give the numbers [{len(examples)}, T] of all positions of whole sequences"
                )

    def document_runs(self, T: int) -> Documents | None:
        """Return (first, last + 1) of the documents of each example; None if each is one.

        T  positions of a whole sequence; ValueError if there are not as many numbers
        """
        if self.documents is None:
            return None
        check_length("documents", self.documents, T)
        ends = [np.flatnonzero(np.diff(row)) + 1 for row in self.documents]
        return [list(pairwise([0, *map(int, inner), T])) for inner in ends]

    def positions_that_count(self, B: int, T: int) -> np.ndarray:
        """Return which positions of whole sequences count in the balance of experts: [B, T]."""
        if self.counted is None:
            return np.ones((B, T), bool)
        check_length("counted", self.counted, T)
        return self.counted

    def knows_batch(self) -> bool:
        """Return whether it says how many positions of the whole update count."""
        return (self.batch if self.counted is None else self.total) is not None

    def total_of(self, counted: np.ndarray) -> float:
        """Return how many positions of the whole update count, of which these are some or all."""
        if self.counted is not None:
            return counted.sum() if self.total is None else self.total
        return counted.size if self.batch is None else self.batch * counted.shape[1]

    def keep(self, name: str, rate: float, shape, window=None, full_shape=None) -> np.ndarray:
        """Return the boolean mask [B, ...] of what dropout at `rate` keeps in layer `name`.

        A rank that holds a part of each example passes the `full_shape` of one example (without B)
        and its `window` into it, one slice per axis. By default it holds whole examples, or the
        rows `positions` of each.
        """
        held = self.held(window, full_shape)
        full_shape = self.full_shape(shape, full_shape)
        element = np.arange(math.prod(full_shape), dtype=np.uint64).reshape(full_shape)
        element = element if held is None else element[held.indices]
        element = element if window is None else element[tuple(window)]
        example = np.asarray(self.examples, np.uint64).reshape(-1, *[1] * element.ndim)
        counter = example * np.uint64(math.prod(full_shape)) + element
        return hash_uniform(self.key(name), counter) >= rate

    def held(self, window=None, full_shape=None) -> Positions | None:
        """Return the rows of each example that an array has, unless its caller says which."""
        return self.positions if window is None and full_shape is None else None

    def key(self, name: str) -> int:
        """Return the 64-bit key of the masks of layer `name`."""
        return digest(self.seed, self.step, name)

    def full_shape(self, shape, full_shape=None) -> tuple[int, ...]:
        """Return the shape of one whole example, by default of an array of this `shape`."""
        if len(self.examples) != shape[0]:
            raise WrongInput(
                f"Randomness has {len(self.examples)} example indices for a batch of {shape[0]}; "
                "give one global index per row"
            )
        if full_shape is not None or self.positions is None:
            return tuple(shape[1:] if full_shape is None else full_shape)
        if len(shape) < 2 or shape[1] != len(self.positions):
            raise WrongInput(
                f"Randomness has {len(self.positions)} positions for an array of {list(shape)}; "
                "give one position per column"
            )
        return (self.positions.length, *shape[2:])


def check_length(name: str, array: np.ndarray, T: int) -> None:
    """Raise ValueError unless Randomness has something for each position of whole sequences."""
    if array.shape[1] != T:
        raise WrongInput(
            f"Randomness has {name} {list(array.shape)} for sequences of {T} positions; give "
            "one entry for every position of the whole sequence"
        )
