"""Published sizes and training runs: their mesh, and the seconds of a step, beside what we predict.

    minidist plan --published

published.toml has the numbers and their sources. Where a paper prints a rate per GPU, its seconds
are

    FLOPs of a step / (ranks rate)        with what is computed again, except for Llama 3

DeepSeek-V3's blocks are none of `TransformerSize`. What its reports print follows from its sizes,
mesh and rates:

    latent attention   C (q + k + R) + q H (D + R) + 2 k H D + H D C parameters: queries, keys and
                       values are made of latents of q and k numbers; R numbers of a head are turned
    an expert          3 C F parameters; a token uses `shared` ones and `top_k` of the others

Letters: C width, H heads, D head width, F width of an expert, T positions, P parameters; B examples
of a batch, b of a micro-batch. Left out: the second token that a position predicts, activations.
"""

import tomllib
from math import comb
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from minidist.errors import WrongInput, unknown
from minidist.planning.costs.memory import korthikanti, memory
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.plans.estimate import Estimate, seconds
from minidist.planning.plans.plan import EFFICIENCY, Machine, Plan

DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
A100, H100 = DATA["machines"]["A100"], DATA["machines"]["H100"]
H800 = H100 | {"link": 160e9}
EIGHT_BITS = 2  # times as many products per second as in 16 bits


def _size(layers: int, width: int, heads: int, sequence: int, vocab: int, hidden: int = 0):
    llama: dict[str, Any] = {"tied": False, "expert_width": hidden, "kv_heads": 8, "llama": True}
    return TransformerSize(layers, width, heads, sequence, vocab, **(llama if hidden else {}))


SIZES = {name: _size(*numbers) for name, numbers in DATA["sizes"].items()}


def size_of(name: str) -> TransformerSize:
    """Return the size of a published model."""
    if name not in SIZES:
        remedy = "; of any other give --layers, --width, --heads, --sequence and --vocab"
        raise WrongInput(unknown("model", name, SIZES) + remedy)
    return SIZES[name]


class Run(NamedTuple):
    """A step of a published run: `seconds` long, on a machine of these rates, 8 ranks in a node."""

    name: str
    size: TransformerSize
    plan: Plan
    batch: int
    seconds: float
    rates: dict[str, Any]

    @property
    def mfu(self) -> float:
        """The model's FLOPs per second, as a share of the machine's peak."""
        return self.size.flops(self.batch) / (self.seconds * self.plan.ranks * self.rates["flops"])

    def predicted(self, efficiency: float = EFFICIENCY) -> Estimate:
        machine = Machine(self.plan.ranks, 8, **self.rates, efficiency=efficiency)
        return seconds(self.size, self.plan, machine, self.batch)


def _run(
    source: str, model: str, ranks: int, tp: int, pp: int, batch: int, rate=0.0, taken=0.0, **more
) -> Run:
    """Return a run that took these seconds, or came to `rate` teraFLOP/s on each rank."""
    size, dp = SIZES[model], ranks // (tp * pp)
    options = DATA["sources"][source] | more
    rates, b = DATA["machines"][options.pop("rates", "A100")], options.pop("b", 1)
    chunks = next((v for v in range(2, 9) if size.layers % (pp * v) == 0), 1)
    usual: dict[str, Any] = {"micro_batches": batch // (dp * b)}
    if pp > 1 and chunks > 1:
        usual |= {"schedule": "interleaved", "chunks": chunks, "cut": "blocks"}
    plan = Plan(dp, pp, tp, **(usual | options))
    taken = taken or size.flops(batch, plan.recompute) / (ranks * rate * 1e12)
    return Run(f"{model} on {ranks:,} ({source})", size, plan, batch, taken, rates)


RUNS = [_run(**run) for run in DATA["runs"]]


def rows(efficiency: float = EFFICIENCY) -> list[dict]:
    """Return a row per run: run, seconds and MFU, those predicted, and predicted / measured."""
    table = []
    for run in RUNS:
        guess = run.predicted(efficiency)
        table.append(
            {
                "run": run.name,
                "seconds": run.seconds,
                "predicted": guess.seconds,
                "ratio": guess.seconds / run.seconds,
                "mfu": run.mfu,
                "predicted_mfu": guess.mfu,
            }
        )
    return table


FORM = "{:<36}{:>9}{:>11}{:>7}{:>7}{:>11}"
HEAD = FORM.format("run", "seconds", "predicted", "ratio", "MFU", "predicted")


def line(row: dict) -> str:
    """Return a row for people."""
    times = f"{row['seconds']:.2f}", f"{row['predicted']:.2f}", f"{row['ratio']:.2f}"
    return FORM.format(row["run"], *times, f"{row['mfu']:.1%}", f"{row['predicted_mfu']:.1%}")


def summary(table: list[dict]) -> str:
    low, *_, high = every = sorted(row["ratio"] for row in table)
    title = f"{len(table)} runs: predicted / measured"
    return f"{title} {low:.2f} to {high:.2f}, median {median(every):.2f}"


def candidates() -> list[tuple[int, float]]:
    """Return (GiB shown, GiB of closed forms) of each candidate of BLOOM.

    They held 2 bytes a weight more; a block that runs again has all its activations for a moment.
    """
    table = []
    for L, C, H, d, t, b, shown in DATA["bloom_candidates"]:
        size, m = TransformerSize(L, C, H, 2048, 250_880), 2048 // (d * b)
        plan = Plan(d, 384 // (d * t), t, micro_batches=m, zero=1, recompute="full")
        held = memory(size, plan, 2048, keeps="korthikanti", per_parameter=18)
        again = korthikanti(size, Plan(tp=t), b).block
        table.append((shown, (sum(held.values()) + held["parameters"] + again) / 2**30))
    return table


class LatentSize(NamedTuple):
    """The sizes of a model of latent attention and many small experts: see published.toml."""

    layers: int
    dense: int
    width: int
    heads: int
    head: int
    query: int
    latent: int
    rotary: int
    hidden: int
    experts: int
    expert: int
    shared: int
    top_k: int
    sequence: int
    vocab: int

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


class LatentStep(NamedTuple):
    """A step of this batch on p x ep x copies ranks, `nodes` of which a token may be sent to."""

    size: LatentSize
    ranks: int
    p: int
    ep: int
    per_node: int
    nodes: int
    batch: int

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
        experts_of_node = size.experts // n
        missed = comb(size.experts - experts_of_node, size.top_k) / comb(size.experts, size.top_k)
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
        parameters = 2 / self.p * (size.replicated + size.routed / self.ep)
        return (2 + 4) * parameters + 8 * size.parameters / self.ranks


DEEPSEEK = LatentStep(LatentSize(**DATA["deepseek"]["size"]), **DATA["deepseek"]["step"])
PRINTED = DATA["deepseek"]["printed"]
TAKEN, BUBBLE, WORK = PRINTED["taken"], PRINTED["bubble"], sum(PRINTED["work"])


def deepseek_rows() -> list[tuple[str, float, float | None]]:
    """Return (name, number from closed forms, number printed) of its step; None: not printed."""
    step, size, printed = DEEPSEEK, DEEPSEEK.size, PRINTED
    tera, masked = (step.tokens * size.flops(causal) / TAKEN / 1e12 for causal in (True, False))
    days = step.tokens * step.ranks / TAKEN * 86400
    return [
        ("parameters, billions", size.parameters / 1e9, printed["parameters"]),
        ("a token uses, billions", size.used / 1e9, printed["used"]),
        ("GFLOPs of a token", size.flops() / 1e9, printed["flops"]),
        (f"TFLOP/s of a GPU, in {TAKEN} s", tera, printed["rate"]),
        ("TFLOP/s with the scores masked away", masked, printed["rate_with_masked_scores"]),
        ("MFU, %, of the peak of 16 bits", 100e12 * tera / H800["flops"], printed["mfu"]),
        ("billions of tokens a day", days / 1e9, printed["tokens_a_day"]),
        ("s of products, at the peaks", step.at_peak(), None),
        ("s of all_to_all, hidden", step.network(), None),
        ("s of the bubble, b = 1", step.bubble(1, WORK), BUBBLE),
        ("GB of states on a GPU", step.held() / 1e9, None),
    ]


def deepseek_text() -> str:
    """Return the rows for people."""
    form = "{:<36}{:>9}{:>11}"
    shown = [form.format("DeepSeek-V3 on 2,048", "computed", "printed")]
    for name, computed, printed in deepseek_rows():
        numbers = f"{computed:.4g}", "" if printed is None else f"{printed:g}"
        shown.append(form.format(name, *numbers))
    return "\n".join(shown)
