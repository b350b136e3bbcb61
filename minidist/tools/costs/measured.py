"""What one step under each strategy costs each rank: what it takes in, sends, holds and computes.

Measured while a step with AdamW runs on real ranks: layers say what enters them, ledgers what is
sent, arrays what is held, and graphs which products were computed. Lesson 20 has the closed forms.

    for rank, cost in enumerate(measure("zero_2", case, cluster)):
        print(rank, cost.sent, cost.held["activations"])
"""

from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np

from minidist import nn, optim
from minidist.autograd import Tensor
from minidist.comm import Cluster, Group, Mesh
from minidist.data_parallel.bucketed import Bucketed
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.parameter_server import Plan, Server, join, train
from minidist.data_parallel.zero import Zero
from minidist.datasets import shard
from minidist.hybrid import Hybrid
from minidist.pipeline_parallel import PipeDream, Pipeline, branch_placement
from minidist.pipeline_parallel.stage import micro_batches
from minidist.tensor_parallel.sequence_parallel import all_reduce_partial
from minidist.tools.costs.watch import Watch, bytes_of
from minidist.tools.strategies import Case, tensor_parallel
from minidist.tools.strategies.cases import as_input
from minidist.tools.strategies.parameter_server import servers_among
from minidist.tools.strategies.pipeline_parallel import chosen

adamw = partial(optim.AdamW, lr=1e-3)


@dataclass(frozen=True)
class Cost:
    """One step of one rank.

    examples, positions  that enter its last layer: of all micro-batches; of each example
    layers  that it runs
    sent    payload bytes that others take from it
    held    bytes of parameters, gradients and optimizer state, as they stay from step to step, and
            of activations, at their peak
    work    multiply-adds of its forward passes; backward does twice as many
    """

    examples: int
    positions: int
    layers: int
    sent: int
    held: dict[str, int]
    work: int

    memory = property(lambda self: sum(self.held.values()))


def measure(name: str, case: Case, cluster: Cluster) -> list[Cost]:
    """Run one step under a strategy on the cluster's ranks; return what it cost each of them.

    The case's options are those of the strategy in `equivalence`. No dropout.
    """
    return cluster.run(_step, name, case)


def rates(case: Case, cluster: Cluster, rounds: int = 5) -> dict[str, float]:
    """Return what a rank does per second while all others do the same, in the best of some rounds.

    speed   multiply-adds, of forward and backward over the whole batch
    update  parameters that AdamW updates
    link    bytes that it sends, in an all_reduce of 8 MB
    """
    found = cluster.run(_rates, case, rounds)
    return {what: min(rank[what] for rank in found) for what in found[0]}


def _rates(group: Group, case: Case, rounds: int) -> dict[str, float]:
    model, watch = case.model, Watch()
    optimizer, numbers = adamw(model.parameters()), group.empty((1 << 20,), "float64")
    acts = {
        "speed": lambda: case.loss(model(case.inputs), case.targets).backward(),
        "update": optimizer.step,
        "link": lambda: group.all_reduce(numbers, out=numbers),
    }
    watch.graph(case.loss(model(case.inputs), case.targets))
    seconds = dict.fromkeys(acts, np.inf)
    for what in rounds * list(acts):
        group.barrier()
        start = perf_counter()
        acts[what]()
        seconds[what] = min(seconds[what], perf_counter() - start)
        if what == "update":
            optimizer.zero_grad()
    P = sum(p.size for p in model.parameters())
    sent = 2 * (group.size - 1) / group.size * numbers.nbytes
    amounts = {"speed": 3 * watch.work, "update": P, "link": sent}
    return {what: amounts[what] / seconds[what] for what in acts}


def _step(group: Group, name: str, case: Case) -> Cost:
    watch = Watch()
    STEPS[name](group, name, case, watch)
    entered = list(watch.entered.values())
    return Cost(
        examples=sum(rows for rows, _ in entered[-1]) if entered else 0,
        positions=entered[-1][0][1] if entered else 0,
        layers=len(entered),
        sent=watch.sent,
        held={what: bytes_of(arrays) for what, arrays in watch.kept.items()}
        | {"activations": watch.peak},
        work=watch.work,
    )


# One step of every strategy: (group, name, case, watch) -> None.


def _loss(group: Group, case: Case, watch: Watch, model: nn.Module) -> Tensor:
    """Return the loss of this rank's examples, divided by the targets of all."""
    weights = [p.data for p in model.parameters()]
    mine = shard(np.arange(len(case.inputs)), group.rank, group.size)
    y = case.loss(model(case.inputs[mine]), case.targets[mine], reduction_size=case.targets.size)
    return watch.graph(y, parameters=weights)


def naive(group: Group, name: str, case: Case, watch: Watch) -> None:
    model = case.model
    watch.layers(model.layers)
    optimizer = adamw(model.parameters())
    _loss(group, case, watch, model).backward()
    all_reduce_gradients(model, group)
    watch.sends(group)
    optimizer.step()
    watch.holds([layer.flat for layer in model.layers], optimizer)


def bucketed(group: Group, name: str, case: Case, watch: Watch) -> None:
    model = case.model.flatten(group.empty)
    watch.layers(model.layers)
    reducer, optimizer = Bucketed(model, group), adamw(model.parameters())
    loss = _loss(group, case, watch, model)
    with reducer.reduce():
        loss.backward()
    watch.sends(reducer.group)
    optimizer.step()
    watch.holds([layer.flat for layer in model.layers], optimizer)


def zero(group: Group, name: str, case: Case, watch: Watch) -> None:
    model = case.model.flatten(group.empty)
    watch.layers(model.layers)
    sharded = Zero(model, group, int(name[-1]))
    optimizer = adamw(sharded.parameters())
    sharded.backward(_loss(group, case, watch, model))
    sharded.step(optimizer)
    watch.sends(*sharded.groups)
    homes = [home for s in sharded.shards for home in (s.flat, s.home)]
    watch.holds(homes, optimizer, sharded.places[1:], sharded.places[:1])


def parameter_server(group: Group, name: str, case: Case, watch: Watch) -> None:
    """Every worker does one minibatch, its share of the batch."""
    servers = servers_among(group.size)
    plan = Plan(servers, {"parameter_server": 0, "downpour": None, "ssp": 1}[name])
    batches = np.array_split(np.arange(len(case.inputs)), group.size - servers)

    def backward(model: nn.Module, batch: int) -> None:
        rows, weights = batches[batch], [p.data for p in model.parameters()]
        y = case.loss(model(case.inputs[rows]), case.targets[rows])
        watch.graph(y, parameters=weights).backward()

    watch.layers(case.model.layers)
    role = train(join(group, case.model, adamw, plan), backward, [group.rank - servers])
    watch.sent = role.group.ledger.bytes["send"]  # not the last weights, gathered at the end
    if isinstance(role, Server):
        watch.holds([role.flat, role.slice.home], role.optimizer)
    else:
        watch.holds([role.flat], gradients=[role.buffer])


def siamese(group: Group, name: str, case: Case, watch: Watch) -> None:
    model, flight = case.model, []
    weights = [p.data for p in model.parameters()]

    def watched(forward, *arguments):
        flight.append(watch.graph(forward(*arguments), flight, weights))
        return flight[-1]

    watch.layers([*model.branch, model.join])
    model.embed = partial(watched, model.embed)
    model.compare = partial(watched, model.compare)
    branch_placement.forward_backward(model, case.inputs, case.targets, group, case.loss)
    branch_placement.all_reduce_shared(model, group)
    watch.sends(group)
    optimizer = adamw(branch_placement.own_parameters(model, group))
    optimizer.step()
    watch.holds([model.flat], optimizer)


def pipeline(group: Group, name: str, case: Case, watch: Watch) -> None:
    m, chunks = chosen(case, group.size, name, **case.options)
    pipe = Pipeline(case.model, group, name, m, chunks, case.loss)
    watch.stages(pipe.stages, pipe.model)
    pipe.backward(case.inputs, case.targets)
    watch.sends(group, *pipe.shared.values())
    optimizer = adamw(pipe.parameters())
    optimizer.step()
    watch.holds([p.home for p in pipe.parameters()], optimizer)


def pipedream(group: Group, name: str, case: Case, watch: Watch) -> None:
    scheme = "2bw" if name == "pipedream_2bw" else "weight_stashing"
    pipe = PipeDream(case.model, group, adamw, scheme, case.loss)
    watch.stages([pipe.stage], pipe.model)
    pipe.train(micro_batches(case.inputs, case.targets, case.options["minibatches"]))
    watch.sends(group)
    weights = pipe.stage.weights
    old = [np.empty_like(weights.flat.vector) for _ in range(weights.most - 1)]
    watch.holds([weights.flat], weights.optimizer, old)


def tensor(group: Group, name: str, case: Case, watch: Watch) -> None:
    model, loss = tensor_parallel.SPLITS[name](group, case)
    watch.layers(model.layers)
    y = loss(model(as_input(case.inputs)), case.targets)
    watch.graph(y, parameters=[p.data for p in model.parameters()]).backward()
    if name == "sequence":
        all_reduce_partial(model, group)
    watch.sends(group)
    optimizer = adamw(model.parameters())
    optimizer.step()
    watch.holds([p.home for p in model.parameters()], optimizer)


def mesh(group: Group, name: str, case: Case, watch: Watch) -> None:
    dp, pp = case.options.get("dp", 1), case.options.get("pp", 1)
    axes = Mesh(group, dp=dp, pp=pp, tp=group.size // (dp * pp))
    hybrid = Hybrid(case.model, axes, "1f1b", case.options.get("micro_batches", 4))
    pipe = hybrid.pipeline
    watch.stages(pipe.stages, pipe.model)
    hybrid.backward(case.inputs, case.targets)
    watch.sends(axes.dp, axes.pp, axes.tp, *pipe.shared.values())
    optimizer = adamw(hybrid.parameters())
    optimizer.step()
    watch.holds([p.home for p in hybrid.parameters()], optimizer)


STEPS = {
    "naive": naive,
    "bucketed": bucketed,
    **dict.fromkeys(("zero_1", "zero_2", "zero_3"), zero),
    **dict.fromkeys(("parameter_server", "downpour", "ssp"), parameter_server),
    "siamese": siamese,
    **dict.fromkeys(
        ("layer_split", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v"), pipeline
    ),
    **dict.fromkeys(("pipedream", "pipedream_2bw"), pipedream),
    **dict.fromkeys(("column", "row", "attention", "vocab", "sequence"), tensor),
    "hybrid": mesh,
}
