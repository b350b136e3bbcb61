"""Published training runs: their mesh, and the seconds of a step, against those that we predict.

    minidist plan --published

Narayanan et al. (SC 2021), tables 1 and 2; Korthikanti et al. (2022), table 5; BigScience, BLOOM's
log; Grattafiori et al. (2024), table 4. Where a paper prints a rate per GPU, its seconds are

    FLOPs of a step / (ranks rate)        with what is computed again, except for Llama 3

What a paper leaves open is chosen here: micro-batches of one example (BLOOM: of two), and for an
interleaved schedule the fewest chunks that cut the blocks equally.
"""

from functools import partial
from statistics import median
from typing import Any, NamedTuple

from minidist.planning.costs.kept import korthikanti
from minidist.planning.costs.memory import memory
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.plans.estimate import Estimate, seconds
from minidist.planning.plans.models import SIZES
from minidist.planning.plans.plan import EFFICIENCY, Machine, Plan

A100 = {  # the datasheet's: dense 16-bit products, NVLink one way, a 200 Gb/s adapter per GPU
    "flops": 312e12,
    "memory": 80e9,
    "link": 300e9,
    "network": 25e9,
    "memory_bandwidth": 2e12,
    "latency": 5e-6,
}
H100 = A100 | {"flops": 989e12, "link": 450e9, "network": 50e9, "memory_bandwidth": 3.35e12}


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
    of: str,
    *,
    source: str,
    ranks: int,
    tp: int,
    pp: int,
    batch: int,
    rate: float = 0,
    taken: float = 0,
    b: int = 1,
    recompute: str = "full",
    rates: dict[str, Any] = A100,
    **more,
) -> Run:
    """Return a run that took these seconds, or came to `rate` teraFLOP/s on each rank."""
    size, dp = SIZES[of], ranks // (tp * pp)
    own: dict[str, Any] = {"micro_batches": batch // (dp * b), "recompute": recompute}
    chunks = next((v for v in range(2, 9) if size.layers % (pp * v) == 0), 1)
    if pp > 1 and chunks > 1:
        own |= {"schedule": "interleaved", "chunks": chunks, "cut": "blocks"}
    plan = Plan(dp, pp, tp, **(own | more))
    taken = taken or size.flops(batch, recompute) / (ranks * rate * 1e12)
    return Run(f"{of} on {ranks:,} ({source})", size, plan, batch, taken, rates)


def rows(efficiency: float = EFFICIENCY) -> list[dict]:
    """Return a row per run: run, seconds and MFU, those predicted, and predicted / measured."""
    found = []
    for run in RUNS:
        guess = run.predicted(efficiency)
        found.append(
            {
                "run": run.name,
                "seconds": run.seconds,
                "predicted": guess.seconds,
                "ratio": guess.seconds / run.seconds,
                "mfu": run.mfu,
                "predicted_mfu": guess.mfu,
            }
        )
    return found


FORM = "{:<36}{:>9}{:>11}{:>7}{:>7}{:>11}"
HEAD = FORM.format("run", "seconds", "predicted", "ratio", "MFU", "predicted")


def line(row: dict) -> str:
    """Return a row for people."""
    times = f"{row['seconds']:.2f}", f"{row['predicted']:.2f}", f"{row['ratio']:.2f}"
    return FORM.format(row["run"], *times, f"{row['mfu']:.1%}", f"{row['predicted_mfu']:.1%}")


def summary(found: list[dict]) -> str:
    low, *_, high = every = sorted(row["ratio"] for row in found)
    words = f"{len(found)} runs: predicted / measured"
    return f"{words} {low:.2f} to {high:.2f}, median {median(every):.2f}"


# BLOOM's candidates: blocks, width, heads, d, t, b; GiB that nvidia-smi showed, on 384 ranks
CANDIDATES = """106 12288 64 8 4 2 67  106 12288 96 8 4 2 65  106 12288 128 8 4 2 67
82 13312 64 8 4 2 63  106 12288 96 8 4 4 79  100 12288 64 8 8 2 61  100 12288 64 8 8 4 72
82 13312 64 4 8 4 52  82 13312 104 8 4 2 62  82 13312 128 8 4 2 60  82 13312 64 8 4 4 74
94 13312 128 8 4 2 67  70 14336 64 4 8 2 40  70 14336 64 8 4 2 59  70 14336 112 8 4 2 59
70 14336 128 8 4 2 60  70 14336 64 8 4 4 73"""


def candidates() -> list[tuple[int, float]]:
    """Return (GiB shown, GiB of closed forms) of each candidate.

    They held 2 bytes a weight more; a block that runs again has all its activations for a moment.
    """
    numbers, found = iter(map(int, CANDIDATES.split())), []
    for L, C, H, d, t, b, shown in zip(*[numbers] * 7, strict=True):
        size, m = TransformerSize(L, C, H, 2048, 250_880), 2048 // (d * b)
        plan = Plan(d, 384 // (d * t), t, micro_batches=m, zero=1, recompute="full")
        held = memory(size, plan, 2048, keeps="korthikanti", per_parameter=18)
        again = korthikanti(size, Plan(tp=t), b).block
        found.append((shown, (sum(held.values()) + held["parameters"] + again) / 2**30))
    return found


_table_1 = partial(_run, source="Megatron-LM 2021")
_table_5 = partial(_run, source="Megatron-LM 2022", recompute="selective", sequence=True)
_bloom = partial(_run, source="BLOOM 2022", b=2, zero=1)
_llama = partial(
    _run,
    source="Llama 3",
    recompute="none",
    sequence=True,
    zero=1,
    rates=H100,
    schedule="interleaved",
    chunks=8,
)

RUNS = [
    _table_1("1.7b", ranks=32, tp=1, pp=1, batch=512, rate=137),
    _table_1("3.6b", ranks=64, tp=2, pp=1, batch=512, rate=138),
    _table_1("7.5b", ranks=128, tp=4, pp=1, batch=512, rate=142),
    _table_1("18.4b", ranks=256, tp=8, pp=1, batch=1024, rate=135),
    _table_1("39.1b", ranks=512, tp=8, pp=2, batch=1536, rate=138),
    _table_1("76.1b", ranks=1024, tp=8, pp=4, batch=1792, rate=140),
    _table_1("145.6b", ranks=1536, tp=8, pp=8, batch=2304, rate=148),
    _table_1("310.1b", ranks=1920, tp=8, pp=16, batch=2160, rate=155),
    _table_1("529.6b", ranks=2520, tp=8, pp=35, batch=2520, rate=163),
    _table_1("1008b", ranks=3072, tp=8, pp=64, batch=3072, rate=163),
    _table_1("175b", ranks=384, tp=8, pp=12, batch=1536, rate=153),
    _table_1("175b", ranks=1536, tp=8, pp=12, batch=1536, rate=141),
    _table_1("529.6b", ranks=560, tp=8, pp=35, batch=2240, rate=171),
    _table_1("529.6b", ranks=2240, tp=8, pp=35, batch=2240, rate=159),
    _table_5("22b", ranks=8, tp=8, pp=1, batch=4, taken=1.10, b=4),
    _table_5("175b", ranks=64, tp=8, pp=8, batch=64, taken=13.75),
    _table_5("529.6b", ranks=280, tp=8, pp=35, batch=280, taken=37.83),
    _table_5("1008b", ranks=512, tp=8, pp=64, batch=512, taken=71.49),
    _bloom("176b", ranks=384, tp=4, pp=12, batch=2048, taken=104.70),
    _llama("405b", ranks=8192, tp=8, pp=16, batch=2048, rate=430),
    _llama("405b", ranks=16384, tp=8, pp=16, batch=2048, rate=400),
]
