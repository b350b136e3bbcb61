"""A mesh of data, pipeline and tensor parallelism: places, sums, one norm, the whole state.

A mesh's shape is (ranks of dp, of pp, of tp).
"""

from itertools import pairwise, product
from math import prod, sqrt
from types import SimpleNamespace

import numpy as np
import pytest

from minidist import Mesh, nn, optim
from minidist.context_parallel import zigzag
from minidist.course.answers import check
from minidist.course.inside import inside, task
from minidist.course.labs.ranks import each_rank, refused
from minidist.data_parallel.zero import Copies
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.parallel import shapes_of
from minidist.pipeline_parallel import Pipeline, programs
from minidist.pipeline_parallel.holders import cut_of, holders
from minidist.tensor_parallel import ParallelTransformer
from minidist.tensor_parallel.sequence_parallel import sequence_parallel
from minidist.verify.strategies.cases import random_weights

SHAPE = ("dp", "pp", "tp")


class Place(Mesh):
    """A mesh without groups: only its arithmetic is asked for."""

    def __init__(self, axes, own):
        self.axes, self.coordinates = dict(axes), dict(own)


@inside
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


@inside
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


@inside
def held(config, cut):
    """Return the stages that hold each parameter of a Transformer."""
    model = nn.Transformer(**config)
    found = holders(model, [range(a, b) for a, b in cut])
    return {"the names": list(found)} | {f"the stages of {n}": at for n, at in found.items()}


def gradients(parameters):
    return {f"d {name}": p.grad for name, p in parameters.items()}


@inside
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


@inside
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


@inside
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


@inside
def clip(sizes, grads, max_norm):
    """Clip on one device: gradients by name, where there are any; zeros are none either."""
    model = nn.MLP(sizes, dtype="float64")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for name, p in model.named_parameters().items():
        p.grad = grads.get(name)
    found = {"the norm": optimizer.clip_global_norm(max_norm)}
    clipped = gradients(model.named_parameters())
    return found | {name: g for name, g in clipped.items() if g is not None and g.any()}


@inside
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


@inside
@each_rank("shape", prod)
def whole(group, shape, arrays, **model):
    """Return the state, and whole arrays that the ranks had parts of."""
    hybrid = OnMesh(group, shape, **model)
    mine = {n: own_part(p, arrays[n]) for n, p in hybrid.named_parameters().items()}
    found, together = hybrid.state(), hybrid.whole(mine)
    names = {"the names of `state`": list(found), "the names of `whole`": list(together)}
    states = {f"state {name}": x for name, x in found.items()}
    return names | states | {f"whole {name}": x for name, x in together.items()}


def drawn(rng, depth, tied, dropout=0.0):
    """Draw a Transformer; return how it is made, and it."""
    config = {"width": 6, "heads": 6, "depth": depth, "context": 6, "dropout": dropout}
    vocab = int(rng.choice([5, 7, 11]))  # over two or three ranks there is padding
    config |= {"vocab": vocab, "tied": tied}
    return config, random_weights(nn.Transformer(**config, dtype="float64"), int(rng.integers(99)))


def batch(rng, config, B, T):
    tokens, targets = rng.integers(0, config["vocab"], (2, B, T))
    return {"tokens": tokens, "targets": targets}


def drawn_gradients(rng, model):
    return {n: rng.standard_normal(p.shape) for n, p in model.named_parameters().items()}


def on_a_mesh(model, config, shape, options):
    """Return the function that makes each rank's part of a model."""
    pp, schedule, chunks = shape[1], options.get("schedule", "1f1b"), options.get("chunks", 1)
    placement = programs(schedule, pp, 4 * pp, chunks).placement
    cut = cut_of(len(model.layers), 1 + max(map(max, placement)))
    at = {
        name: [r for r, own in enumerate(placement) if set(own) & set(stages)]
        for name, stages in holders(model, cut).items()
    }
    return {
        "shape": shape,
        "config": config,
        "state": model.state(),
        "layers": [[i for k in own for i in cut[k]] for own in placement],
        "shared": {name: own for name, own in at.items() if len(own) > 1},
        "split_sequence": options.get("split_sequence", False),
    }


ONE, SEVERAL = "one axis", "several axes"  # that really split
AXES = [
    {"dp": 3, "pp": 1, "tp": 4},
    {"rows": 2, "columns": 3},
    {"only": 5},
    {"w": 2, "x": 2, "y": 1, "z": 3},
]


@task("6.1")
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_a_place_and_its_rank_say_each_other(axes, rng):
    coordinates.check(axes, {name: int(rng.integers(size)) for name, size in axes.items()})


@task("6.2")
@pytest.mark.parametrize("axes", [*AXES, {"dp": 2, "pp": 2, "tp": 3}], ids=str)
def test_every_rank_is_in_a_line_of_each_axis(axes):
    mesh.check(N=prod(axes.values()), axes=axes)


@task("6.2")
@pytest.mark.parametrize("axes, N", [({"dp": 2, "tp": 2}, 3), ({"dp": 4, "tp": 0}, 2)])
def test_a_mesh_of_other_ranks_is_refused(axes, N):
    mesh.check(N=N, axes=axes)


@task("6.3")
@pytest.mark.parametrize("stages, tied", [(1, True), (2, True), (3, False), (4, True)])
def test_the_holders_of_a_parameter_are_its_stages(stages, tied, rng):
    config, model = drawn(rng, int(rng.integers(3, 5)), tied)
    ends = np.sort(rng.permutation(np.arange(1, len(model.layers)))[: stages - 1])
    held.check(config, list(pairwise([0, *ends.tolist(), len(model.layers)])))


@task("6.3")
@pytest.mark.parametrize(
    "group, N, options, m, batches",
    [
        ("a batch", 1, {}, 2, 1),
        ("a batch", 2, {}, 3, 1),
        ("a batch on top of another one", 2, {}, 2, 2),
        ("a batch on top of another one", 3, {"schedule": "gpipe"}, 2, 2),
        ("a batch", 2, {"schedule": "zb_v"}, 3, 1),
        ("a batch", 2, {"schedule": "interleaved", "chunks": 2}, 2, 1),
    ],
)
def test_a_tied_parameter_has_the_sum_of_its_stages(group, N, options, m, batches, rng):
    config, model = drawn(rng, 3 if "chunks" in options else 2, True)
    given = batch(rng, config, int(rng.integers(1, 4)), int(rng.integers(2, 7)))
    given |= {"N": N, "config": config, "state": model.state(), "options": options}
    pipeline.check(**given, m=m, batches=batches)


SHAPES = [
    (ONE, (1, 1, 1), {"micro_batches": 1}),
    (ONE, (3, 1, 1), {"micro_batches": 2, "schedule": "gpipe"}),
    (SEVERAL, (2, 2, 1), {"micro_batches": 3}),
    (ONE, (1, 1, 2), {"micro_batches": 2, "split_sequence": True}),
    (SEVERAL, (2, 1, 2), {"micro_batches": 1}),
    (SEVERAL, (2, 2, 2), {"micro_batches": 2, "split_sequence": True, "schedule": "zb_h1"}),
]
each_shape = pytest.mark.parametrize("group, shape, options", SHAPES)


@task("6.4")
@each_shape
def test_a_gradient_is_summed_over_the_axes_that_have_a_part_of_it(group, shape, options, rng):
    config, model = drawn(rng, 2, True)
    empty = int(rng.integers(shape[0])) + 1  # on dp, if there is one of this number
    grads: list[dict] = []
    for d, _, t in product(*map(range, shape)):
        alike = t and "split_sequence" not in options  # on tp they are the same
        grads.append(grads[-1] if alike else drawn_gradients(rng, model))
        if d == empty:
            grads[-1] = dict.fromkeys(grads[-1])
    sums.check(**on_a_mesh(model, config, shape, options), grads=grads)


@task("6.5")
@each_shape
def test_a_batch_leaves_one_devices_gradients(group, shape, options, rng):
    config, model = drawn(rng, 2, True, dropout=0.3)
    B, (seed, step) = int(rng.integers(1, 7)), rng.integers(0, 99, 2).tolist()
    given = {"shape": shape, "config": config, "options": options, "seed": seed, "step": step}
    given |= {"state": model.state(), **batch(rng, config, B, 2 * int(rng.integers(1, 4)))}
    given |= {"examples": None if shape == (2, 1, 2) else rng.permutation(50)[:B]}
    check(backward(**given), backward.package(**given), at_most=("bytes on dp",))


def norm_of(grads):
    return sqrt(sum(float((g * g).sum()) for g in grads.values()))


@task("6.6")
@pytest.mark.parametrize("factor, missing", [(0.3, False), (2.0, False), (0.5, True)])
def test_one_device_clips_the_norm_of_all_gradients(factor, missing, rng):
    sizes = rng.integers(1, 6, 3).tolist()
    grads = drawn_gradients(rng, nn.MLP(sizes, dtype="float64"))
    if missing:
        del grads["layers.0.bias"]
    clip.check(sizes, grads, factor * norm_of(grads))


@task("6.6")
@pytest.mark.parametrize(
    "group, shape, tied, factor",
    [
        (ONE, (1, 1, 1), True, 0.5),
        (ONE, (2, 1, 1), True, 0.4),
        (ONE, (1, 2, 1), True, 0.7),
        (ONE, (1, 1, 2), True, 0.3),
        (SEVERAL, (1, 3, 2), True, 1.5),
        (SEVERAL, (2, 2, 2), False, 0.6),
    ],
)
def test_a_mesh_counts_every_element_once_in_the_norm(group, shape, tied, factor, rng):
    config, model = drawn(rng, 2, tied)
    grads = drawn_gradients(rng, model)
    given = on_a_mesh(model, config, shape, {})
    clip_on_mesh.check(**given, grads=grads, max_norm=factor * norm_of(grads))


@task("6.7")
@pytest.mark.parametrize(
    "group, shape, tied, options",
    [
        (ONE, (1, 1, 1), True, {}),
        (ONE, (1, 2, 1), True, {}),
        (ONE, (1, 1, 3), False, {}),
        (SEVERAL, (1, 2, 2), True, {"schedule": "interleaved", "chunks": 2}),
        (SEVERAL, (2, 2, 2), False, {}),
    ],
)
def test_the_state_is_put_together_from_all_parts(group, shape, tied, options, rng):
    config, model = drawn(rng, 2, tied)
    arrays = {name: rng.standard_normal(x.shape) for name, x in model.state().items()}
    whole.check(**on_a_mesh(model, config, shape, options), arrays=arrays)
