"""Measure a profile of a model's layers, let PipeDream's planner cut the model, and run the plan.

    profiled = profile_and_run(model, inputs, targets, ranks=4)
    print(text(profiled))                                  # `minidist plan --profile` prints it

Narayanan et al. (SOSP 2019), section 3.1: profile, plan, run. The planner knows the profile and a
bandwidth, and nothing else of the machine. So every rank measures at the same time as all others,
with its share of the cores, as later in the run. The run is certified: its weights equal, bit for
bit, those of a replay on one rank, and its bytes the closed form.
"""

import time
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np

from minidist import nn, optim
from minidist.backend import Array
from minidist.comm import Group, run
from minidist.nn.datasets import Batch
from minidist.observe.step_parts import median_seconds
from minidist.pipeline_parallel import PipeDream, programs
from minidist.pipeline_parallel.partition import measured_costs
from minidist.planning import simulate
from minidist.planning.costs.strategies import boundary_bytes
from minidist.planning.pipedream import options_of, pipedream
from minidist.rng import generator
from minidist.verify import equivalence
from minidist.verify.strategies import Case

REPEATS = 5  # of each measurement; the median counts
MINIBATCHES = 24  # of the stream that is run


@dataclass(frozen=True)
class Profiled:
    """A profile, the plan made of it, and the run of the plan; seconds and bytes.

    profile     per layer: seconds of forward and backward of a minibatch, bytes of its output, of
                its parameters
    bandwidth   bytes per second from one rank to another
    stages      (first layer, last + 1, replicas)
    seconds     per minibatch, as the planner says
    simulated   per minibatch of a stream of MINIBATCHES, as the simulator says, which knows how a
                pipeline fills and drains; without transfers
    measured    the same on real ranks
    certificate a row of `equivalence.check`
    """

    ranks: int
    cost: str
    profile: list[tuple[float, int, int]]
    bandwidth: float
    stages: list[tuple[int, int, int]]
    seconds: float
    simulated: float
    measured: float
    certificate: dict

    def row(self) -> dict:
        """Return its fields for JSON; the bandwidth of one rank alone is None."""
        return asdict(self) | {"bandwidth": self.bandwidth if self.ranks > 1 else None}


def profile_and_run(
    model: nn.Sequential,
    inputs: np.ndarray,
    targets: np.ndarray,
    ranks: int = 2,
    bandwidth: float | None = None,
    cost: str = "paper",
    transport: str = "process",
    timeout: float | None = None,
) -> Profiled:
    """Profile a model on one minibatch, plan for these ranks, run and certify the plan.

    bandwidth  bytes per second; None: measured
    cost       of the planner: "paper" or "released"
    """
    profiles = run(_profile, ranks, model, inputs, transport=transport, timeout=timeout)
    layers = zip(*(seconds for seconds, _, _ in profiles), strict=True)
    profile = [
        (median(seconds), *sizes) for seconds, sizes in zip(layers, profiles[0][1], strict=True)
    ]
    bandwidth = min(rate for *_, rate in profiles) if bandwidth is None else bandwidth
    stages, seconds = pipedream(profile, ranks, bandwidth, cost)
    options = options_of(stages)
    x, y = (np.concatenate([array] * MINIBATCHES) for array in (inputs, targets))
    seconds_of = run(_train, ranks, model, x, y, options, transport=transport, timeout=timeout)
    measured = max(seconds_of)
    case = Case("the plan", model, x, y, options={"minibatches": MINIBATCHES} | options)
    certificate = equivalence.check("pipedream", case, ranks, transport=transport)
    simulated = _simulated(profile, stages, ranks)
    return Profiled(
        ranks, cost, profile, bandwidth, stages, float(seconds), simulated, measured, certificate
    )


def example(layers: int = 6, width: int = 64, sequence: int = 64, vocab: int = 512) -> tuple:
    """Return a Transformer whose layers differ, and a minibatch of 8 examples for it."""
    model = nn.Transformer(vocab, width, max(1, width // 16), layers, sequence)
    return model, *generator(0, "profile").integers(0, vocab, (2, 8, sequence))


def _profile(group: Group, model: nn.Sequential, inputs: Array) -> tuple[list, list, float]:
    """Return the seconds of each layer, (activation, parameter) bytes of each, and bandwidth."""
    case = Case("a minibatch", model, inputs, inputs)
    outputs = boundary_bytes(case)
    held = [sum(p.data.nbytes for p in layer.parameters()) for layer in model.layers]
    group.barrier()
    seconds = measured_costs(model, inputs, repeats=REPEATS)
    group.barrier()
    return seconds, list(zip(outputs, held, strict=True)), _bandwidth(group, max(outputs))


def _bandwidth(group: Group, size: int) -> float:
    """Return the bytes per second of messages of this size between neighbours, all at once."""

    def both_ways() -> None:
        group.send(array, peer)
        group.recv(peer)

    peer, array = group.rank ^ 1, np.zeros(size, "uint8")
    if peer >= group.size:
        return float("inf")
    return 2 * size / median_seconds(both_ways, repeats=REPEATS)


def _train(group: Group, model: nn.Sequential, inputs, targets, options: dict) -> float:
    """Return this rank's seconds per minibatch of a stream; one goes before, to warm up."""
    pipe = PipeDream(model, group, lambda parameters: optim.SGD(parameters, lr=1e-3), **options)
    stream = Batch(inputs, targets).micro_batches(MINIBATCHES)
    pipe.train(stream[: 2 * group.size])
    group.barrier()
    start = time.perf_counter()
    pipe.train(stream)
    group.barrier()
    return (time.perf_counter() - start) / MINIBATCHES


def _simulated(profile: list, stages: list, ranks: int) -> float:
    """Return the seconds per minibatch that such a stream takes on virtual clocks."""
    third = [sum(layer[0] for layer in profile[first:stop]) / 3 for first, stop, _ in stages]
    replicas = [k for _, _, k in stages]
    stream = programs("pipedream", ranks, MINIBATCHES, replicas=replicas)
    return simulate(stream, third, third, third).makespan / MINIBATCHES


def text(profiled: Profiled) -> str:
    """Return the profile, the plan and its run as lines."""
    lines = ["layer   seconds  activation bytes  parameter bytes"]
    for i, (seconds, activation, parameters) in enumerate(profiled.profile):
        lines.append(f"{i:5}  {seconds:8.5f}  {activation:16,}  {parameters:15,}")
    lines.append(f"\n{profiled.ranks} ranks, {profiled.bandwidth:.3g} bytes/s, {profiled.cost}:")
    for first, stop, replicas in profiled.stages:
        stage = sum(seconds for seconds, _, _ in profiled.profile[first:stop])
        lines.append(f"  layers {first} to {stop - 1} on {replicas}: {stage:.5f} / {replicas} s")
    times = f"{profiled.seconds:.5f} planned, {profiled.simulated:.5f} simulated and "
    times += f"{profiled.measured:.5f} measured"
    row = profiled.certificate
    return "\n".join(
        [
            *lines,
            f"seconds per minibatch of a stream of {MINIBATCHES}: {times}",
            f"{row['promise']}: {row['detail']}; {row['bytes']:,} bytes, "
            f"{row['bytes_formula']:,} by the formula",
        ]
    )
