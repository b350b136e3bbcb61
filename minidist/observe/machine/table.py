"""Predicted over measured seconds of a step of every strategy, on this machine.

    for row in predict_and_measure():
        print(line(row))

No strategy is timed to predict it: what a step does is counted (trace.py), what each thing takes is
measured by itself (rates.py), and the ranks share the machine's cores (planning/shared_cores.py).
Rates and steps are measured in turns, so that a slow moment of the machine affects both.
"""

from collections.abc import Iterator
from statistics import median

from minidist.comm import Cluster
from minidist.errors import check_name
from minidist.observe.machine import steps
from minidist.observe.machine.prediction import predicted
from minidist.observe.machine.trace import Log, trace, used
from minidist.verify.strategies import STRATEGIES

SIZES = (1, 2, 4)


def predict_and_measure(
    names: list[str] | None = None,
    sizes: tuple[int, ...] = SIZES,
    rounds: int = 3,
    repeats: int = 3,
) -> Iterator[dict]:
    """Yield a row per strategy and number of ranks: strategy, ranks, milliseconds, and their ratio.

    names    of strategies; by default all that lesson 20 compares
    rounds   how often all are measured; a ratio is the median of the rounds' ratios
    repeats  steps in a round; their median counts
    """
    names = [n for n in STRATEGIES if STRATEGIES[n].costs.compared] if names is None else names
    for name in names:
        check_name("strategy", name, STRATEGIES)
    if unfit := [size for size in sizes if size not in (1, 2, 3, 4)]:
        raise ValueError(f"strategies are measured on 1 to 4 ranks, not on {unfit[0]}")
    for size in sizes:
        yield from _on(size, [n for n in names if size in STRATEGIES[n].ranks], rounds, repeats)


def _on(size: int, names: list[str], rounds: int, repeats: int) -> Iterator[dict]:
    predictions: dict[str, list[float]] = {name: [] for name in names}
    took: dict[str, list[float]] = {name: [] for name in names}
    with Cluster(size) as ranks:
        cases = {name: steps.workload(name, size) for name in names}
        done: dict[str, list[Log]] = {}
        for _ in range(rounds):
            for name, case in cases.items():
                if name not in done:
                    done[name] = ranks.run(trace, name, case)
                found = ranks.run(steps.in_turns, name, case, used(done[name]), repeats)
                took[name].append(median(map(max, zip(*(own for _, own in found), strict=True))))
                predictions[name].append(predicted(done[name], found[0][0]))
    for name in names:
        yield {
            "strategy": name,
            "ranks": size,
            "predicted_ms": 1e3 * median(predictions[name]),
            "measured_ms": 1e3 * median(took[name]),
            "ratio": median(a / b for a, b in zip(predictions[name], took[name], strict=True)),
        }


FORM = "{:<18}{:>6}{:>12}{:>12}{:>8}"
HEAD = FORM.format("strategy", "ranks", "predicted", "measured", "ratio")


def line(row: dict) -> str:
    """Return a row of `predict_and_measure` for people."""
    times = (f"{row[key]:.1f} ms" for key in ("predicted_ms", "measured_ms"))
    return FORM.format(row["strategy"], row["ranks"], *times, f"{row['ratio']:.2f}")


def summary(rows: list[dict]) -> str:
    """Return how far predictions are from what was measured: the median and the largest error."""
    errors = {(row["strategy"], row["ranks"]): abs(row["ratio"] - 1) for row in rows}
    worst = max(errors, key=lambda row: errors[row])
    return (
        f"{len(rows)} predictions: median error {median(errors.values()):.0%}, largest "
        f"{errors[worst]:.0%} ({worst[0]} on {worst[1]})"
    )
