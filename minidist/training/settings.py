"""The settings of `minidist train`: what to train, how, and on which mesh. Each is an option."""

from dataclasses import asdict, dataclass, field
from typing import NamedTuple, TypeVar

from minidist.errors import WrongInput

OF_MESHES = "dp pp cp tp ep zero schedule micro_batches".split()
OF_SERVERS = "servers staleness quorum push_every fetch_every sparse".split()
T = TypeVar("T")


class Bound(NamedTuple):
    """What a number is at most, and why; its kind, if it is no whole number; what it is at least.

    A whole number is from 1, another one from 0, unless `least` says otherwise.
    """

    most: float
    why: str
    kind: str = ""
    least: int = 1


def setting(default: T, description: str, bound: Bound | None = None, metavar: str = "") -> T:
    """Return a field, with all that its option needs; metavar: by default the option's name."""
    metadata = {"description": description, "bound": bound, "metavar": metavar}
    return field(default=default, metadata=metadata)


MEMORY = "a model's weights and activations have to fit in memory"
STEPS = Bound(1_000_000, "the loss of every update is kept")
PARTS = Bound(1_048_576, MEMORY)
RANKS = Bound(10_000, "each rank has a connection to every other one")
SEED = Bound(2**64 - 1, "a seed has 64 bits", least=0)
HEADS = Bound(2048, "a head has a column of the width")
LR = Bound(1e30, "no loss is finite long before", "a learning rate")
DROPOUT = Bound(0.999, "some activations have to stay", "a rate")
WEIGHT = Bound(1e6, "the other losses have weight 1", "a weight")
ZERO = Bound(3, "ZeRO has three stages", least=0)


@dataclass(frozen=True)
class Settings:
    """What to train and how; the product of dp, pp, cp and tp is the number of ranks.

    Not every kind of data takes every setting, and some have defaults of their own (kinds.py).
    """

    steps: int = setting(400, "updates of the weights", STEPS)
    batch: int = setting(32, "windows, images or pairs per update, over all ranks", PARTS)
    context: int = setting(64, "characters per window", Bound(4096, MEMORY))
    width: int = setting(64, "model width, a multiple of --heads", Bound(2048, MEMORY))
    heads: int = setting(4, "attention heads", HEADS)
    depth: int = setting(2, "blocks", Bound(1000, MEMORY))
    model: str = setting("gpt2", "what the blocks of a language model are made of")
    kv_heads: int = setting(
        0,
        "heads of keys and values of a llama, a divisor of --heads; 0: as many",
        HEADS._replace(least=0),
    )
    lr: float = setting(3e-3, "highest learning rate", LR)
    optimizer: str = setting("adamw", "of the weights; muon: of the blocks' matrices, AdamW else")
    dropout: float = setting(0.0, "dropout rate", DROPOUT)
    tied: bool = setting(False, "let the output share the embedding's weights")
    reconstruction: float = setting(
        0.0,
        "above 0: train the way back, too, and weight W: what one wrote tells the other the source",
        WEIGHT,
        "W",
    )
    experts: int = setting(
        0,
        "experts per block, of which each position takes two; 0: none",
        Bound(1000, MEMORY, least=0),
    )
    seed: int = setting(0, "seed of the weights, the order of the examples, and the sample", SEED)
    shuffle: bool = setting(
        True,
        "the examples, anew in every epoch, which is the default; --no-shuffle: every epoch in the "
        "order of the data, to see what shuffling buys",
    )
    dp: int = setting(1, "ranks that split the batch (default: what --ranks leaves)", RANKS)
    pp: int = setting(1, "ranks that split the layers", RANKS)
    cp: int = setting(1, "ranks that split the positions of every window", RANKS)
    tp: int = setting(1, "ranks that split the matrices", RANKS)
    ep: int = setting(1, "ranks that split the experts, a divisor of --dp", RANKS)
    zero: int = setting(
        0,
        "stage of ZeRO: copies share 1: the optimizer's state, 2: also gradients, 3: also weights",
        ZERO,
    )
    schedule: str = setting(
        "1f1b", "schedule of the pipeline, used if --pp is above 1", metavar="NAME"
    )
    micro_batches: int = setting(4, "micro-batches per pipeline and update", PARTS)
    servers: int | None = setting(
        None, "ranks, the first ones, that keep the weights for the others", RANKS
    )
    staleness: int | None = setting(
        None,
        "minibatches that a worker may be ahead of the slowest; 0: synchronous (default: any "
        "number). With --quorum: updates in a row that a worker may miss",
        Bound(1_000_000, "a run has no more minibatches", least=0),
        "S",
    )
    quorum: int | None = setting(
        None,
        "workers that suffice for an update; late gradients stay in their worker's buffer",
        RANKS,
        "Q",
    )
    push_every: int | None = setting(
        None, "minibatches whose gradients are sent as one", STEPS, "N"
    )
    fetch_every: int | None = setting(None, "minibatches from one pull to the next", STEPS, "N")
    sparse: bool = setting(
        False, "push only rows that are not zero; the servers then use Adagrad, not AdamW"
    )
    precision: str = setting(
        "float32",
        "of weights, activations and gradients, for 16 bits with a float32 copy of the weights; "
        "bfloat16-stochastic: no copy, rounded at random; float8: bfloat16, and products of 8 bits",
        metavar="DTYPE",
    )

    def __post_init__(self):
        """Refuse ranks with nothing to do, which the objects on a mesh would accept."""
        share = -(-self.batch // self.dp)
        if self.on_mesh and self.micro_batches > share:
            raise WrongInput(
                f"a batch of {self.batch} windows gives each of {self.dp} data-parallel ranks at "
                f"most {share}, too few for {self.micro_batches} micro-batches; use {share} or "
                f"fewer, or a batch of {(self.micro_batches - 1) * self.dp + 1} or more"
            )
        if self.ep > 1 and self.experts < self.ep:
            raise WrongInput(
                f"ep={self.ep} ranks cannot share {self.experts} experts; "
                f"use experts={self.ep} or more"
            )

    @property
    def fits(self) -> bool:
        """Whether the mesh can cut the model, as the objects that cut it would say on its ranks.

        Elastic training looks for a smaller mesh where no ranks can be asked.
        """
        kv_heads = self.kv_heads or self.heads
        return (
            self.heads % self.tp == 0
            and max(self.tp, kv_heads) % min(self.tp, kv_heads) == 0
            and self.context >= self.cp
            and self.dp % self.ep == 0
        )

    @property
    def on_mesh(self) -> bool:
        """Whether ranks split more than the batch, and Hybrid trains."""
        return self.pp * self.cp * self.tp * self.ep > 1 or self.zero > 0

    @property
    def dtype(self) -> str:
        """The dtype of the weights."""
        dtypes = {"bfloat16-stochastic": "bfloat16", "float8": "bfloat16"}
        return dtypes.get(self.precision, self.precision)

    @property
    def half(self) -> bool:
        """Whether weights have 16 bits."""
        return self.precision != "float32"

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.cp * self.tp


def mesh_in_words(settings: Settings) -> str:
    """Return the words between `4 ranks, ` and the size of a batch."""
    if not settings.on_mesh:
        return "each with its part of every batch of"
    axes = {"data": settings.dp, "pipeline": settings.pp}
    if settings.cp > 1:
        axes["context"] = settings.cp
    axes["tensor"] = settings.tp
    parts = [f"{' x '.join(map(str, axes.values()))} ({', '.join(axes)})"]
    if settings.ep > 1:
        parts.append(f"experts over {settings.ep}")
    if settings.zero:
        parts.append(f"ZeRO stage {settings.zero}")
    return ", ".join([*parts, "for batches of"])


DEFAULTS = asdict(Settings())
