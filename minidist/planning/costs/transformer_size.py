"""Parameters and FLOPs of a Transformer of any size, without arrays.

Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM
(SC 2021), equations 2 and 3, in our letters:

    P = 12 L C^2 (1 + 13 / (12 C) + (V + T) / (12 L C))
    FLOPs = 96 B T L C^2 (1 + T / (6 C) + V / (16 L C))        with full recomputation

A matrix product of n multiply-adds takes 2 n FLOPs forward and 4 n backward. Attention counts all
T x T scores, with those that the causal mask hides. Equation 2 leaves the last norm out, 2 C.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from minidist.errors import WrongInput
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
    expert_width
              F inside a feed-forward part or an expert; 0: 4C
    shared    experts that compute every position, as one of F = shared times expert_width
    kv_heads  K, heads of keys and values; 0: as many as heads
    llama     `nn.Llama`: SwiGLU, gains alone in its norms, no biases, no learned positions
    """

    layers: int
    width: int
    heads: int
    sequence: int
    vocab: int
    tied: bool = True
    experts: int = 0
    top_k: int = 2
    expert_width: int = 0
    shared: int = 0
    kv_heads: int = 0
    llama: bool = False

    def __post_init__(self):
        for name in ("layers", "width", "heads", "sequence", "vocab", "top_k"):
            check_count(name, getattr(self, name))
        if self.layers > MOST_LAYERS:
            raise WrongInput(
                f"{self.layers} layers are too many, for each is listed; "
                f"use {MOST_LAYERS:,} or less"
            )
        if self.width % self.heads:
            raise WrongInput(
                f"width {self.width} does not split into {self.heads} heads; "
                f"use a multiple of {self.heads}"
            )
        if self.experts != 0:
            check_count("experts", self.experts)
            if self.top_k > self.experts:
                raise WrongInput(f"cannot choose {self.top_k} of {self.experts} experts")
        for name in ("expert_width", "shared", "kv_heads"):
            if getattr(self, name) != 0:
                check_count(name, getattr(self, name))
        if self.shared and not self.experts:
            raise WrongInput(f"{self.shared} shared experts are beside others; use shared=0")
        if self.kv_heads and (not self.llama or self.heads % self.kv_heads):
            raise WrongInput(
                f"{self.kv_heads} heads of keys and values are for a Llama whose heads are a "
                f"multiple, not for {self.heads} heads; use kv_heads=0"
            )

    @classmethod
    def of(cls, model: "nn.Module") -> Self:
        """Return the sizes of a model, used at its whole context."""
        from minidist import nn  # a size alone needs no arrays

        if not isinstance(model, nn.Transformer):
            raise WrongInput(
                f"there is no closed form of what the layers of an nn.{type(model).__name__} hold "
                "and compute; measure a step (observe/costs.py), or use an nn.Transformer"
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
                    **(_of_mixture(first.mixture) if isinstance(first, nn.ExpertBlock) else {}),
                    **(_of_llama(model) if isinstance(model, nn.Llama) else {}),
                )
        raise WrongInput("a Transformer without blocks has no size here; give it depth=1 or more")

    def attention_parameters(self, n: int = 1) -> int:
        """Return how many parameters of a block's attention each of n ranks of tp holds.

        QKV C 3C + 3C and output C C are split; every rank has the output's bias and two norms, 5 C.
        A Llama has no biases; its keys and values C 2KD are split into K parts at most.
        """
        C = self.width
        if self.llama:
            return 2 * C * C // n + 2 * C * self.key_width // min(n, self.key_heads) + 2 * C
        return (4 * C * C + 3 * C) // n + 5 * C

    @property
    def positions(self) -> int:
        """The rows of C numbers that are learned for positions."""
        return 0 if self.llama else self.sequence

    @property
    def norm(self) -> int:
        """Parameters of a norm for each of the C numbers of its input."""
        return 1 if self.llama else 2

    @property
    def key_heads(self) -> int:
        """K, the number of heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def key_width(self) -> int:
        """K D, the numbers of a position's keys."""
        return self.width * self.key_heads // self.heads

    @property
    def hidden(self) -> int:
        """F, the width inside a feed-forward part or an expert."""
        return self.expert_width or 4 * self.width

    def expert_parameters(self, n: int = 1, experts: int = 1) -> int:
        """Return how many parameters of a feed-forward part, or expert, each of n ranks holds.

        C F + F and F C are split, a bias C is not.

        experts  so many as one, with F = experts times `hidden`; 0: none
        """
        C, F = self.width, experts * self.hidden
        if self.llama:
            return 3 * C * F // n
        return (2 * C * F + F) // n + C if experts else 0

    @property
    def block_parameters(self) -> int:
        """Of one block, with all experts and their gate [C, E]: dense, 12 C^2 + 13 C."""
        feed_forward = max(1, self.experts) * self.expert_parameters()
        feed_forward += self.expert_parameters(experts=self.shared)
        return self.attention_parameters() + feed_forward + self.width * self.experts

    @property
    def parameters(self) -> int:
        """Of the whole model; a tied weight counts once."""
        ends = (1 if self.tied else 2) * self.vocab + self.positions + self.norm
        return self.layers * self.block_parameters + ends * self.width

    def block_multiply_adds(self, positions: int) -> int:
        """Return the multiply-adds of a block's forward pass, attention's two products included."""
        C, T = self.width, self.sequence
        chosen = self.top_k + self.shared if self.experts else 1
        used = chosen * (3 if self.llama else 2) * C * self.hidden
        attention = 2 * C * (C + self.key_width) + 2 * T * C
        return positions * (attention + used + C * self.experts)

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


def _of_llama(model: "nn.Llama") -> dict[str, Any]:
    return {"llama": True, "kv_heads": model.kv_heads, "expert_width": model.hidden}


def _of_mixture(mixture: "nn.MixtureOfExperts") -> dict[str, Any]:
    C, width = mixture.gate.weight.shape[0], mixture.expert_width
    sizes = {"expert_width": 0 if width == 4 * C else width, "shared": mixture.shared_experts}
    return {"top_k": mixture.top_k} | sizes
