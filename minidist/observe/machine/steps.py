"""Time one step of any strategy, on a workload whose step is some tens of milliseconds."""

import copy
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import numpy as np
from threadpoolctl import threadpool_limits

from minidist import nn
from minidist.backend import keep_freed_memory
from minidist.comm import Group
from minidist.nn import Module
from minidist.observe.machine.rates import Rates, measure_rates, merged
from minidist.rng import generator
from minidist.verify.strategies import STRATEGIES, Case
from minidist.verify.watch import Watch

EXAMPLES = {nn.CNN: 8, nn.Siamese: 128, nn.MLP: 32}  # how often a batch of these is repeated
WORKLOAD = {"B": 16, "T": 32, "C": 64, "H": 8, "L": 6, "V": 128}  # of the Transformer


class StepTimes(Watch):
    """A watch that looks at nothing but the clock: when a step begins and when it is done."""

    def __init__(self, group: Group, now: Callable = perf_counter):
        super().__init__()
        self.group, self.now = group, now
        self.model()

    def layers(self, layers):
        return list(layers)

    def graph(self, y, others=(), parameters=()):
        return y

    def model(self, model: Module | None = None) -> None:
        self.group.barrier()
        self.begin = self.now()

    def stages(self, stages, model) -> None:
        self.model()

    def sends(self, nbytes) -> None:
        pass

    def holds(self, homes, optimizer=None, parameters=(), gradients=(), state=()) -> None:
        self.end = self.now()

    seconds = property(lambda self: self.end - self.begin)


def workload(name: str, ranks: int) -> Case:
    """Return the strategy's example on these ranks, larger: a step takes tens of milliseconds."""
    case = STRATEGIES[name].costs.example(ranks)
    if not isinstance(case.model, nn.Transformer):
        times = next(n for kind, n in EXAMPLES.items() if isinstance(case.model, kind))
        inputs, targets = (np.repeat(x, times, axis=0) for x in (case.inputs, case.targets))
        return replace(case, inputs=inputs, targets=targets)
    B, T, C, H, L, V = WORKLOAD.values()
    tokens, nexts = generator(0, "workload").integers(0, V, (2, B, T))
    model = nn.Transformer(V, C, H, L, T, dtype="float64", experts=case.model.experts)
    return replace(case, model=model, inputs=tokens, targets=nexts)


def in_turns(
    group: Group, name: str, case: Case, wanted: set, repeats: int
) -> tuple[Rates, list[float]]:
    """Return the machine's rates, and the seconds of steps with AdamW; a worker of `run`.

    Rates and steps are measured in turns, so that a slow moment of the machine affects both. Every
    step begins with a new copy of the model. A rank has one BLAS thread. It should have run the
    step once before: `trace` does.
    """
    keep_freed_memory()
    rates, found = [], []
    with threadpool_limits(1):
        for _ in range(repeats):
            watch = StepTimes(group)
            STRATEGIES[name].step(group, copy.deepcopy(case), watch)
            found.append(watch.seconds)
            rates.append(measure_rates(group, wanted, repeats=1))
    return merged(rates), found
