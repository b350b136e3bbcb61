"""Parameters and FLOPs of a Transformer of any size, without arrays.

Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM
(SC 2021), equations 2 and 3, in our letters:

    P = 12 L C^2 (1 + 13 / (12 C) + (V + T) / (12 L C))
    FLOPs = 96 B T L C^2 (1 + T / (6 C) + V / (16 L C))        with full recomputation

A matrix product of n multiply-adds takes 2 n FLOPs forward and 4 n backward. Attention counts all
T x T scores, with those that the causal mask hides. Equation 2 leaves the last norm out, 2 C.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from minidist.planning.plans.plan import RECOMPUTE, check_count, check_one_of

if TYPE_CHECKING:
    from minidist import nn

MOST_LAYERS = 10_000


@dataclass(frozen=True)
class TransformerSize:
    """The sizes of `nn.Transformer`.

    layers    blocks, L; the embedding and the head are not counted
    width, heads, sequence, vocab
              C, H, T, V; there is one learned position per place of the sequence
    tied      whether the head's weight is the token embedding
    experts   of each block's feed-forward part, top_k of which compute a position; 0: dense
    """

    layers: int
    width: int
    heads: int
    sequence: int
    vocab: int
    tied: bool = True
    experts: int = 0
    top_k: int = 2

    def __post_init__(self):
        for name in ("layers", "width", "heads", "sequence", "vocab", "top_k"):
            check_count(name, getattr(self, name))
        if self.layers > MOST_LAYERS:
            raise ValueError(
                f"{self.layers} layers are too many, for each is listed; "
                f"use {MOST_LAYERS:,} or less"
            )
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} does not split into {self.heads} heads; "
                f"use a multiple of {self.heads}"
            )
        if self.experts != 0:
            check_count("experts", self.experts)
            if self.top_k > self.experts:
                raise ValueError(f"cannot choose {self.top_k} of {self.experts} experts")

    @classmethod
    def of(cls, model: "nn.Module") -> Self:
        """Return the sizes of a model, used at its whole context."""
        from minidist import nn  # a size alone needs no arrays

        if not isinstance(model, nn.Transformer):
            raise ValueError(
                f"there is no closed form of what the layers of an nn.{type(model).__name__} hold "
                "and compute; measure a step (observe/costs/measured.py), or use an nn.Transformer"
            )
        match model.layers:
            case [_, nn.Block() | nn.ExpertBlock() as first, *_, nn.Head() as head]:
                return cls(
                    layers=len(model.layers) - 2,
                    width=head.norm.gain.size,
                    heads=first.attention.heads,
                    sequence=model.context,
                    vocab=model.vocab,
                    tied=head.tied,
                    experts=model.experts,
                    top_k=first.mixture.top_k if isinstance(first, nn.ExpertBlock) else 2,
                )
        raise ValueError("a Transformer without blocks has no size here; give it depth=1 or more")

    def attention_parameters(self, n: int = 1) -> int:
        """Return how many parameters of a block's attention each of n ranks of tp holds.

        QKV C 3C + 3C and output C C are split; every rank has the output's bias and two norms, 5 C.
        """
        C = self.width
        return (4 * C * C + 3 * C) // n + 5 * C

    def expert_parameters(self, n: int = 1) -> int:
        """Return how many parameters of a feed-forward part, or expert, each of n ranks holds.

        C 4C + 4C and 4C C are split, a bias C is not.
        """
        C = self.width
        return (8 * C * C + 4 * C) // n + C

    @property
    def block_parameters(self) -> int:
        """Of one block, with all experts and their gate [C, E]: dense, 12 C^2 + 13 C."""
        feed_forward = max(1, self.experts) * self.expert_parameters()
        return self.attention_parameters() + feed_forward + self.width * self.experts

    @property
    def parameters(self) -> int:
        """Of the whole model; a tied weight counts once."""
        ends = (1 if self.tied else 2) * self.vocab + self.sequence + 2
        return self.layers * self.block_parameters + ends * self.width

    def block_multiply_adds(self, positions: int) -> int:
        """Return the multiply-adds of a block's forward pass, attention's two products included."""
        C, T = self.width, self.sequence
        chosen = self.top_k if self.experts else 1
        return positions * (4 * C * C + chosen * 8 * C * C + C * self.experts + 2 * T * C)

    def flops(self, batch: int, recompute: bool | str = False) -> int:
        """Return the FLOPs of a step on `batch` examples.

        recompute  False or "none": backward is twice forward. True or "full": every block's forward
                   runs twice, the head's once. "selective": attention's two products run twice
        """
        if not isinstance(recompute, bool):
            check_one_of("recompute", recompute, RECOMPUTE)
        positions = batch * self.sequence
        forward = 2 * self.layers * self.block_multiply_adds(positions)
        head = 2 * positions * self.width * self.vocab
        again = forward if recompute in (True, "full") else 0
        if recompute == "selective":
            again = 2 * self.layers * positions * 2 * self.sequence * self.width
        return 3 * (forward + head) + again
