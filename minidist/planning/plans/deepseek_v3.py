"""DeepSeek-V3's run: what follows from its sizes, mesh and rates, beside what its reports print.

    minidist plan --published

DeepSeek-AI, DeepSeek-V3 Technical Report (2024), sections 2.1 and 3: 2,048 H800 GPUs, 16 stages of
DualPipe, 64 ranks of experts, ZeRO 1, no tensor axis. Zhao et al., Insights into DeepSeek-V3 (ISCA
2025), tables 2 and 4, count and time a step. Its blocks are none of `TransformerSize`:

    latent attention   C (q + k + R) + q H (D + R) + 2 k H D + H D C parameters: queries, keys and
                       values are made of latents of q and k numbers; R numbers of a head are turned
    an expert          3 C F parameters; a token uses `shared` ones and `top_k` of the others

Letters: C width, H heads, D head width, F width of an expert, T positions, P parameters; B examples
of a batch, b of a micro-batch. Left out: the second token that a position predicts, activations.
"""

from dataclasses import dataclass
from math import comb
from typing import NamedTuple

from minidist.planning.plans.published import H100

H800 = H100 | {"link": 160e9}  # section 3.2.2; "network": 50 GB/s, as there
EIGHT_BITS = 2  # times as many products per second as in 16 bits


@dataclass(frozen=True)
class LatentSize:
    """The sizes of a model of latent attention and many small experts (section 4.2).

    dense, hidden   the first blocks have no experts, but one wide part
    query, latent, rotary
                    numbers of a latent for queries, of one for keys and values; those turned
    """

    layers: int = 61
    dense: int = 3
    width: int = 7168
    heads: int = 128
    head: int = 128
    query: int = 1536
    latent: int = 512
    rotary: int = 64
    hidden: int = 18432
    experts: int = 256
    expert: int = 2048
    shared: int = 1
    top_k: int = 8
    sequence: int = 4096
    vocab: int = 129_280

    @property
    def attention(self) -> int:
        """Parameters of a block's attention, with the norms of both latents."""
        C, H, D, R, q, k = self.width, self.heads, self.head, self.rotary, self.query, self.latent
        return C * (q + k + R) + q * H * (D + R) + 2 * k * H * D + H * D * C + q + k

    @property
    def one_expert(self) -> int:
        return 3 * self.width * self.expert

    @property
    def routed(self) -> int:
        """Parameters of all experts that are chosen: those that the axis ep splits."""
        return (self.layers - self.dense) * self.experts * self.one_expert

    @property
    def replicated(self) -> int:
        """Parameters of all the rest; each expert has a row of the gate and a bias."""
        C, sparse = self.width, self.layers - self.dense
        blocks = self.layers * (self.attention + 2 * C) + self.dense * 3 * C * self.hidden
        gates = sparse * (self.shared * self.one_expert + self.experts * (C + 1))
        return blocks + gates + 2 * self.vocab * C + C

    @property
    def parameters(self) -> int:
        return self.routed + self.replicated

    @property
    def used(self) -> int:
        """Parameters that a token is multiplied by: the embedding is a look-up."""
        chosen = (self.layers - self.dense) * self.top_k * self.one_expert
        return self.replicated - self.vocab * self.width + chosen

    def scores(self, causal: bool) -> int:
        """Return a token's FLOPs of attention's two products, forward and backward."""
        seen = (self.sequence + 1) / 2 if causal else self.sequence
        return round(6 * self.layers * self.heads * (2 * self.head + self.rotary) * seen)

    def flops(self, causal: bool = True) -> int:
        """Return the FLOPs of a token; not causal: with the scores that the mask hides."""
        return 6 * self.used + self.scores(causal)


class Step(NamedTuple):
    """A step of this batch on p x ep x copies ranks, `nodes` of which a token may be sent to."""

    size: LatentSize = LatentSize()
    ranks: int = 2048
    p: int = 16
    ep: int = 64
    per_node: int = 8
    nodes: int = 4
    batch: int = 15360

    @property
    def tokens(self) -> float:
        """Tokens of a step per rank: all of them pass each of the p stages."""
        return self.batch * self.size.sequence / self.ranks

    def at_peak(self) -> float:
        """Return the seconds of the products at the peaks: of 8 bits, and of 16.

        In 16 bits are the head, the gates and attention's own products (section 3.3.1).
        """
        size = self.size
        gates = (size.layers - size.dense) * size.experts * size.width
        wide = 6 * (size.vocab * size.width + gates) + size.scores(causal=True)
        return self.tokens * (wide + (size.flops() - wide) / EIGHT_BITS) / H800["flops"]

    def bubble(self, b: float, work: float) -> float:
        """Return the seconds in which a rank waits, (p/2 - 1) (F&B + B - 3 W).

        work  seconds of all its micro-batches. F, B and W are shares of them by FLOPs: scores have
              no weights, so that W has none (the report's table 2)
        """
        one = work / (self.batch * self.p / self.ranks / b)  # F&B: F takes a third, B two
        weights = 1 - self.size.scores(causal=True) / self.size.flops()
        return (self.p / 2 - 1) * (1 + 2 / 3 - weights) * one

    def crossings(self, limited: bool = True) -> float:
        """Return to how many other nodes a token goes, where all nodes are as likely."""
        size, n = self.size, self.ep // self.per_node
        own = size.experts // n
        missed = comb(size.experts - own, size.top_k) / comb(size.experts, size.top_k)
        reached = min(self.nodes, n) if limited else n * (1 - missed)
        return reached * (1 - 1 / n)

    def network(self, out: int = 1, crossings: float | None = None) -> float:
        """Return the seconds of all_to_all on a rank's network: forward, and as much backward.

        out  bytes of a number on the way to experts; a sum comes back in 2 (section 3.3.3)
        """
        away = self.crossings() if crossings is None else crossings
        each = 2 * (out + 2) * self.size.width * (self.size.layers - self.size.dense)
        return self.tokens * each * away / H800["network"]

    def held(self) -> float:
        """Return a rank's bytes of states, the mean: DualPipe holds two stages of each rank.

        2 bytes a weight and 4 a gradient (3.3.3); of all ranks together 8 P of the optimizer: a
        weight in float32, two moments in 16 bits.
        """
        size = self.size
        own = 2 / self.p * (size.replicated + size.routed / self.ep)
        return (2 + 4) * own + 8 * size.parameters / self.ranks


TAKEN, BUBBLE = 19.926, 2.06  # seconds of a step: Zhao et al., table 4
WORK = 1.13 + 1.99 + 0.48 + 13.95  # its forwards, backwards, weights' halves, and pairs of them


def rows() -> list[tuple[str, float, float | None]]:
    """Return (what, from closed forms, printed) of its step; None: no report prints it."""
    step, size = Step(), LatentSize()
    tera, whole = (step.tokens * size.flops(causal) / TAKEN / 1e12 for causal in (True, False))
    return [
        ("parameters, billions", size.parameters / 1e9, 671),
        ("a token uses, billions", size.used / 1e9, 36.6),  # README_WEIGHTS.md; the report: 37
        ("GFLOPs of a token", size.flops() / 1e9, 250),
        (f"TFLOP/s of a GPU, in {TAKEN} s", tera, 385),
        ("TFLOP/s with the scores masked away", whole, 432),
        ("MFU, %, of the peak of 16 bits", 100e12 * tera / H800["flops"], 38.94),
        ("billions of tokens a day", step.tokens * step.ranks / TAKEN * 86400 / 1e9, 272.80),
        ("s of products, at the peaks", step.at_peak(), None),
        ("s of all_to_all, hidden", step.network(), None),
        ("s of the bubble, b = 1", step.bubble(1, WORK), BUBBLE),
        ("GB of states on a GPU", step.held() / 1e9, None),
    ]


def text() -> str:
    """Return the rows for people."""
    form = "{:<36}{:>9}{:>11}"
    shown = [form.format("DeepSeek-V3 on 2,048", "computed", "printed")]
    for what, found, printed in rows():
        shown.append(form.format(what, f"{found:.4g}", "" if printed is None else f"{printed:g}"))
    return "\n".join(shown)
