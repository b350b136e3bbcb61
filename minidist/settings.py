"""The settings of `minidist train`: what to train, how, and on which mesh."""

from dataclasses import dataclass

OF_MESHES = "dp pp cp tp ep zero schedule micro_batches".split()


@dataclass(frozen=True)
class Settings:
    """What to train and how; `batch` counts windows of `context` characters, over all ranks.

    It counts images of digits, and pairs of numbers. Not every kind of data takes every setting,
    and some have defaults of their own (kinds.py).

    reconstruction           above 0: its weight, for two translators (nn.Dual)
    experts                  per block, each position takes two; 0: a dense feed-forward part
    shuffle                  False: every epoch has the order of the data
    dp, pp, cp, tp           the mesh; their product is the number of ranks
    ep                       neighbours on dp that hold different experts
    zero                     1: ranks with the same parameters share the optimizer's state
    schedule, micro_batches  of the pipeline, on a mesh
    precision                dtype of weights, activations and gradients: float32, or float16 or
                             bfloat16 with a float32 copy of the weights
    """

    steps: int = 400
    batch: int = 32
    context: int = 64
    width: int = 64
    heads: int = 4
    depth: int = 2
    lr: float = 3e-3
    dropout: float = 0.0
    tied: bool = False
    reconstruction: float = 0.0
    experts: int = 0
    seed: int = 0
    shuffle: bool = True
    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    micro_batches: int = 4
    precision: str = "float32"

    def __post_init__(self):
        share = -(-self.batch // self.dp)
        if self.on_mesh and self.micro_batches > share:
            raise ValueError(
                f"a batch of {self.batch} windows gives each of {self.dp} data-parallel ranks at "
                f"most {share}, too few for {self.micro_batches} micro-batches; use {share} or "
                f"fewer, or a batch of {(self.micro_batches - 1) * self.dp + 1} or more"
            )
        if self.reconstruction and (self.on_mesh or self.half):
            raise ValueError(
                "two translators with reconstruction are trained by ranks that split the batch "
                "alone, in float32; use no other axis than dp, no ZeRO, and precision float32, or "
                "reconstruction=0"
            )
        if self.heads % self.tp:
            raise ValueError(
                f"cannot split {self.heads} heads over {self.tp} ranks; use a multiple of {self.tp}"
            )
        if self.context < self.cp:
            raise ValueError(
                f"cannot cut windows of {self.context} characters over cp={self.cp} ranks; use at "
                f"least {self.cp} characters, or {self.context} ranks at most"
            )
        if self.dp % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide dp={self.dp}; use a dp that is a multiple of it"
            )
        if self.ep > 1 and self.experts < self.ep:
            raise ValueError(
                f"ep={self.ep} ranks cannot share {self.experts} experts; "
                f"use experts={self.ep} or more"
            )

    @property
    def on_mesh(self) -> bool:
        """Whether ranks split more than the batch, and Hybrid trains."""
        return self.pp * self.cp * self.tp * self.ep > 1 or self.zero > 0

    @property
    def half(self) -> bool:
        """Whether weights have 16 bits, and float32 copies."""
        return self.precision != "float32"

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.cp * self.tp
