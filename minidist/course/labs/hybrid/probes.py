"""What the hybrid lab asks of a student's code; it runs beside that code, and judges nothing.

Ranks are threads.
"""

from itertools import product
from math import prod
from types import SimpleNamespace

import numpy as np

from minidist import Mesh, nn, optim
from minidist.context_parallel import zigzag
from minidist.course.labs.ranks import each_rank, refused
from minidist.data_parallel.zero import Copies
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.parallel import shapes_of
from minidist.pipeline_parallel import Pipeline
from minidist.pipeline_parallel.holders import holders
from minidist.tensor_parallel import ParallelTransformer
from minidist.tensor_parallel.sequence_parallel import sequence_parallel

SHAPE = ("dp", "pp", "tp")


class Place(Mesh):
    """A mesh without groups: only its arithmetic is asked for."""

    def __init__(self, axes, own):
        self.axes, self.coordinates = dict(axes), dict(own)


def coordinates(axes, own):
    """Return every rank's coordinates, every place's rank, and those beside this rank.

    own  the coordinates of this rank: what an axis keeps that is not named
    """
    mesh = Place(axes, own)
    ranges = product(*(range(size) for size in axes.values()))
    places = [dict(zip(axes, at, strict=True)) for at in ranges]
    found = [mesh.coordinates_of(rank) for rank in range(len(places))]
    beside = [mesh.rank_of(**{name: c}) for name, size in axes.items() for c in range(size)]
    wrong = [{"nowhere": 0}, *({name: c} for name, n in axes.items() for c in (-1, n))]
    answer = {f"the coordinates of {r}": [at[n] for n in axes] for r, at in enumerate(found)}
    answer |= {
        "the coordinates are in the order of the axes": [list(at) == list(axes) for at in found],
        "the ranks of all places": [mesh.rank_of(**at) for at in places],
        "the ranks of places of which one axis is named": beside,
    }
    return answer | {f"{at} is refused": refused(mesh.rank_of, **at) for at in wrong}


@each_rank("N")
def mesh(group, N, axes):
    """Return, on every rank, where it is and who is on its axes; or whether it is refused."""
    try:
        made = Mesh(group, **axes)
    except ValueError:
        return {"refused": True}
    found = {"coordinates": [made.coordinates[name] for name in axes]}
    for name in axes:
        axis = getattr(made, name)
        found[f"the ranks of {name}"] = axis.all_gather(np.array([group.rank]))
        found[f"the own number in {name}"] = axis.rank
    return found


def transformer(config, state):
    model = nn.Transformer(**config, dtype="float64")
    model.load_state(state)
    return model


def held(config, cut):
    """Return the stages that hold each parameter of a Transformer."""
    model = nn.Transformer(**config)
    found = holders(model, [range(a, b) for a, b in cut])
    return {"the names": list(found)} | {f"the stages of {n}": at for n, at in found.items()}


def gradients(parameters):
    return {f"d {name}": p.grad for name, p in parameters.items()}


@each_rank("N")
def pipeline(group, N, config, state, tokens, targets, m, batches, options):
    """Run some batches on top of each other through a pipeline; what its shared groups sent."""
    made = Pipeline(transformer(config, state), group, micro_batches=m, **options)
    for _ in range(batches):
        made.backward(Batch(tokens, targets))
    shared = [g.ledger.total for g in made.shared.values()]
    return gradients(made.named_parameters()) | {"bytes in shared groups": sum(shared)}


class OwnLayers(Pipeline):
    """What a Pipeline knows of this rank's layers; no other task has to be done for it."""

    def __init__(self, model, group, shared):
        self.model, self.group, self.shared = model, group, shared


class OnMesh(Hybrid):
    """A Hybrid whose mesh and pipeline are made here; no other task has to be done for it.

    layers  of every rank of the axis pp
    shared  {parameter: the ranks of pp that share it}
    """

    def __init__(self, group, shape, config, state, layers, shared, split_sequence=False):
        at = np.unravel_index(group.rank, shape)
        axes = {}
        for i, name in enumerate(SHAPE):
            line = [0 if i == j else c for j, c in enumerate(at)]
            axes[name] = group.split(int(np.ravel_multi_index(line, shape)), key=int(at[i]))
        model = transformer(config, state)
        self.mesh, self.split_sequence = SimpleNamespace(**axes), split_sequence
        self.shapes = shapes_of(model)
        split = sequence_parallel if split_sequence else ParallelTransformer
        model, pp = split(model, axes["tp"]), axes["pp"]
        own = nn.Sequential([model.layers[k] for k in layers[at[1]]])
        groups = {name: pp.split(0 if at[1] in ranks else None) for name, ranks in shared.items()}
        groups = {name: group for name, group in groups.items() if group is not None}
        self.model, self.pipeline = own, OwnLayers(own, pp, groups)
        self.replicas = axes["dp"]
        self.tp_sums = axes["tp"]
        self.cp = self.expert_group = group.split(group.rank)
        self.positions, self.same_experts, self.experts = zigzag, axes["dp"], []
        self.copies = Copies(self.copied_slices(), own.parameters)


def own_part(p, whole):
    """Return this rank's part of an array like the whole parameter's; None is None."""
    if whole is None:
        return None
    return np.array(whole) if p.shard is None else p.shard.of(whole)


@each_rank("shape", prod)
def sums(group, shape, grads, **model):
    """Sum the gradients of which every rank was given the whole; None where it has none."""
    hybrid = OnMesh(group, shape, **model)
    for name, p in hybrid.named_parameters().items():
        p.grad = own_part(p, grads[group.rank][name])
    before = {name: getattr(hybrid.mesh, name).ledger.total for name in SHAPE}
    hybrid.sum_gradients(hybrid.pipeline.model.layers)
    sent = {f"bytes on {n}": getattr(hybrid.mesh, n).ledger.total - before[n] for n in SHAPE}
    return gradients(hybrid.named_parameters()) | sent


def on_mesh(group, shape, config, state, options):
    made = Mesh(group, **dict(zip(SHAPE, shape, strict=True)))
    return Hybrid(transformer(config, state), made, **options)


@each_rank("shape", prod)
def backward(group, shape, config, state, options, tokens, targets, seed, step, examples):
    """Return a batch's gradients, and whether a second batch on top of them is refused."""
    hybrid = on_mesh(group, shape, config, state, options)
    more = {"seed": seed, "step": step, "examples": examples}
    loss = hybrid.backward(Batch(tokens, targets, **more))
    sent = hybrid.mesh.dp.ledger.total
    found = {k: v.copy() for k, v in gradients(hybrid.named_parameters()).items()}
    again = refused(hybrid.backward, Batch(tokens, targets, **more))
    found |= {"the loss": loss, "bytes on dp": sent}
    return found | {"a batch on top of summed gradients is refused": again}


def clip(sizes, grads, max_norm):
    """Clip on one device: gradients by name, where there are any; zeros are none either."""
    model = nn.MLP(sizes, dtype="float64")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for name, p in model.named_parameters().items():
        p.grad = grads.get(name)
    found = {"the norm": optimizer.clip_global_norm(max_norm)}
    clipped = gradients(model.named_parameters())
    return found | {name: g for name, g in clipped.items() if g is not None and g.any()}


@each_rank("shape", prod)
def clip_on_mesh(group, shape, grads, max_norm, **model):
    """Clip gradients that are spread over a mesh."""
    hybrid = OnMesh(group, shape, **model)
    optimizer = optim.SGD(hybrid.parameters(), lr=0.1)
    for name, p in hybrid.named_parameters().items():
        p.grad = own_part(p, grads[name])
    found = {}
    if shape[2] > 1:  # parts of larger parameters, whose squares must be summed over ranks
        found["refused without sum_squares"] = refused(optimizer.clip_global_norm, max_norm)
    found["the norm"] = optimizer.clip_global_norm(max_norm, hybrid.sum_squares)
    return found | gradients(hybrid.named_parameters())


@each_rank("shape", prod)
def whole(group, shape, arrays, **model):
    """Return the state, and whole arrays that the ranks had parts of."""
    hybrid = OnMesh(group, shape, **model)
    mine = {n: own_part(p, arrays[n]) for n, p in hybrid.named_parameters().items()}
    found, together = hybrid.state(), hybrid.whole(mine)
    names = {"the names of `state`": list(found), "the names of `whole`": list(together)}
    states = {f"state {name}": x for name, x in found.items()}
    return names | states | {f"whole {name}": x for name, x in together.items()}
