"""A plan says how a training run is split; a machine says what its ranks can do.  Values, checked.

Plan(dp=6, pp=64, tp=8, micro_batches=512)       # 3,072 ranks: Megatron-LM's run of 1 T
Machine(3072, 8, flops=312e12, memory=80e9, link=300e9, network=25e9)
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Integral, Rational, Real

from minidist.errors import WrongInput, check_number
from minidist.pipeline_parallel.schedules import SCHEDULES

RECOMPUTE = "none", "selective", "full"
MOST, LARGEST = 10**18, 1e300  # of counts, and of other numbers: sums and products are floats
PRECISIONS = "mixed", "float32"
V_SHAPED = tuple(name for name, kind in SCHEDULES.items() if kind.most_chunks == 2)  # and no fewer
ASYNCHRONOUS = tuple(name for name, kind in SCHEDULES.items() if kind.asynchronous)
SYNCHRONOUS = [name for name in SCHEDULES if name not in ASYNCHRONOUS]
LEFT_OUT = "layer_split", "zb_auto"  # always waits; is a search of its own, for measured times
EFFICIENCY = 0.58  # of products: the middle of what published runs ask for (published.py)


@dataclass(frozen=True)
class Plan:
    """How a training run is split over a mesh of dp x pp x cp x tp ranks.

    dp, pp, tp, cp   ranks along the axes: examples, layers, matrices, positions
    ep               neighbours on dp that hold different experts; it divides dp
    micro_batches    of each data rank's share of the batch
    schedule, chunks
                     of the pipeline: a name of `pipeline_parallel.programs`, stages per rank
    zero             stage of ZeRO over dp x cp: 1 optimizer, 2 and gradients, 3 and parameters
    recompute        "selective": attention's scores; "full": whole blocks, from their inputs
    sequence         whether tp splits the positions too, between the split matrices
    precision        "mixed": weights and activations of 2 bytes, optimizer in float32; "float32"
    cut              of a pipeline: "layers": embedding, blocks and head in stages of equal numbers
                     of layers, as `Pipeline` does; "blocks": equal numbers of blocks, as Megatron
    shards           neighbours of dp x cp that share one of ZeRO's copies; None: all
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    zero: int = 0
    recompute: str = "none"
    sequence: bool = False
    precision: str = "mixed"
    chunks: int = 1
    cut: str = "layers"
    shards: int | None = None

    def __post_init__(self):
        for name in ("dp", "pp", "tp", "cp", "ep", "micro_batches", "chunks"):
            check_count(name, getattr(self, name))
        check_one_of("recompute", self.recompute, RECOMPUTE)
        check_one_of("precision", self.precision, PRECISIONS)
        check_one_of("cut", self.cut, ("layers", "blocks"))
        check_one_of("zero", self.zero, (0, 1, 2, 3))
        check_one_of("schedule", self.schedule, SYNCHRONOUS)
        if self.dp % self.ep:
            raise WrongInput(f"ep={self.ep} does not divide dp={self.dp}; use a divisor of it")
        if self.sequence and self.cp > 1:
            raise WrongInput(f"cp={self.cp} cuts the sequence already; use sequence=False or cp=1")
        if self.shards is not None:
            self.check_shards(self.shards)
        most = SCHEDULES[self.schedule].most_chunks
        if most is not None and self.chunks > most:
            raise WrongInput(f"{self.schedule} has at most {most} chunks, not {self.chunks}")
        if self.schedule in V_SHAPED and self.chunks != 2:
            raise WrongInput(f"{self.schedule} has 2 chunks per rank, not {self.chunks}")

    def check_shards(self, k: int) -> None:
        """Raise ValueError unless runs of k ranks of dp x cp can share a copy."""
        check_count("shards", k)
        if self.zero == 0 or self.ep > 1:
            raise WrongInput(
                f"shards={k} is for ZeRO, and not for experts over ep={self.ep}; "
                "use zero=1, 2 or 3, and ep=1"
            )
        if self.data % k or (k % self.cp and self.cp % k):
            raise WrongInput(
                f"groups of {k} shards do not make up dp={self.dp} x cp={self.cp}; use a divisor "
                "of cp, or cp times a divisor of dp"
            )

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    @property
    def data(self) -> int:
        """The ranks that hold the same parameters, experts aside: dp x cp."""
        return self.dp * self.cp

    @property
    def sharing(self) -> int:
        """The ranks that share one of ZeRO's copies: all with the same parameters, or `shards`."""
        return self.shards or self.data

    @property
    def one_copy(self) -> "Plan":
        """The mesh of those that share one of ZeRO's copies: neighbours on cp, then on dp."""
        if self.sharing < self.cp:
            return replace(self, dp=1, pp=1, cp=self.sharing, shards=None)
        return replace(self, dp=self.sharing // self.cp, shards=None)

    @property
    def itemsize(self) -> int:
        """Bytes of a weight, and of an activation that travels."""
        return 2 if self.precision == "mixed" else 4


@dataclass(frozen=True)
class Machine:
    """What each rank of a cluster can do, per second.

    ranks, per_node   in all, and in one node; ranks are numbered node by node
    flops             floating-point operations per second of a large matrix product
    memory            bytes that a rank can hold
    memory_bandwidth  bytes per second to and from its own memory
    link, network     bytes per second that a rank sends inside its node, and to other nodes
    latency           seconds before the first byte of a message arrives
    overhead          seconds that the start of one operation takes
    efficiency        share of `flops` that products come to; or ((smallest dimension, share), ...),
                      rising, between which it is interpolated
    """

    ranks: int
    per_node: int
    flops: float
    memory: float
    link: float
    network: float
    latency: float = 0
    memory_bandwidth: float = math.inf
    overhead: float = 0
    efficiency: float | tuple[tuple[int, float], ...] = 1.0

    def __post_init__(self):
        check_count("ranks", self.ranks)
        check_count("per_node", self.per_node)
        for name in ("flops", "memory", "link", "network", "memory_bandwidth"):
            rule, value = f"{name} is a number above 0", getattr(self, name)
            check_number(rule, value, lambda x: x == math.inf or (is_amount(x) and x > 0))
        for name in ("latency", "overhead"):
            check_number(f"{name} is a number from 0", getattr(self, name), is_amount)
        for share in (shares := [share for _, share in self.table]) or [0]:
            check_number("efficiency is a number above 0 and up to 1", share, lambda x: 0 < x <= 1)
        if list(self.table) != sorted(self.table) or shares != sorted(shares):
            raise WrongInput(f"efficiency rises with the dimension of a product: {self.table}")

    @property
    def table(self) -> tuple[tuple[int, float], ...]:
        return self.efficiency if isinstance(self.efficiency, tuple) else ((1, self.efficiency),)

    def efficiency_of(self, dimension: int) -> float:
        """Return the share of `flops` of a product whose smallest dimension this is."""
        (low, least), *others = self.table
        for high, most in others:
            if dimension < high:
                return least + (most - least) * max(0, dimension - low) / (high - low)
            low, least = high, most
        return least


def check_count(name: str, value) -> None:
    if type(value) is int and 1 <= value <= MOST:
        return  # no words are made: a search makes thousands of plans
    check_number(f"{name} is a whole number from 1", value, lambda n: n >= 1, Integral)
    if value > MOST:
        raise WrongInput(f"{name} is too large: use {MOST:,} or less")


def is_amount(value) -> bool:
    """Return whether it is a number from 0, and not too large for a product of floats."""
    if not isinstance(value, Real):
        return False
    return 0 <= (Fraction(value) if isinstance(value, Rational) else float(value)) <= LARGEST


def check_one_of(name: str, value, allowed) -> None:
    if value not in allowed or isinstance(value, bool):
        raise WrongInput(f"{name} is one of {', '.join(map(str, allowed))}, not {value!r}")
