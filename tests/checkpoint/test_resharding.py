"""Saved on one mesh, loaded on another: every bit of the weights and of the optimizer's state."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import Mesh, checkpoint, nn, optim
from minidist.checkpoint import Saved, manifest, parts_of, restore
from minidist.checkpoint.manifest import slice_of
from minidist.checkpoint.parts import about
from minidist.data_parallel.zero import Zero
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.nn.shard import pieces
from minidist.pipeline_parallel import Pipeline
from minidist.tensor_parallel import ParallelTransformer
from minidist.verify.compare import compare
from tests.strategies import assert_same_bits, seeds

TOKENS = np.arange(40).reshape(8, 5) * 7 % 11
MESHES = [  # dp, pp, cp, tp, ep, zero
    (dp, pp, cp, tp, ep, zero)
    for dp, pp, cp, tp, ep in product((1, 2, 3), (1, 2, 3), (1, 2), (1, 2, 3), (1, 2, 3))
    for zero in (0, 1, 3)
    if dp * pp * cp * tp <= 6 and dp % ep == 0
]


def transformer(seed=0, tied=False, experts=4):
    more = {"tied": tied, "experts": experts, "dropout": 0.1}
    return nn.Transformer(11, 12, 6, 4, 5, seed, "float64", **more)


def on_mesh(group, model, mesh, schedule="1f1b"):
    *sizes, ep, zero = mesh
    axes = Mesh(group, **dict(zip(("dp", "pp", "cp", "tp"), sizes, strict=True)))
    return Hybrid(model, axes, schedule, ep=ep, zero=zero, micro_batches=2)


def adamw(holder):
    return optim.AdamW(holder.parameters(), lr=1e-2, weight_decay=0.1)


def stepped(hybrid, steps=2):
    optimizer = adamw(hybrid)
    for step in range(steps):
        hybrid.backward(Batch(TOKENS, TOKENS, step=step))
        hybrid.step(optimizer)
    return optimizer


def state_on_one_device(model):
    """Return {name: array} as a checkpoint of one device has it, with drawn numbers."""
    random = np.random.default_rng(7)
    optimizer = adamw(model)
    optimizer.state = [[random.random(len(s.data)) for _ in range(2)] for s in optimizer.slices]
    optimizer.steps = 9
    return parts_of(model, optimizer), about(optimizer)


def saved(folder, holder, optimizer, step, group=None):
    about_it = {"optimizer": about(optimizer)}
    checkpoint.save(folder, parts_of(holder, optimizer), step, group, about_it)


def save_on(group, source, folder, mesh, options):
    """Save what is loaded from `source` on this mesh."""
    hybrid = on_mesh(group, transformer(5, **options), mesh)
    optimizer = adamw(hybrid)
    restore(Saved.newest(source), hybrid, optimizer)
    saved(folder, hybrid, optimizer, 9, group)


@given(
    st.sampled_from(MESHES), st.sampled_from(MESHES), st.booleans(), st.sampled_from([0, 4]), seeds
)
@settings(max_examples=3)
def test_what_is_saved_on_one_mesh_is_loaded_on_another_bit_for_bit(
    cluster, tmp_path_factory, a, b, tied, experts, seed
):
    """One device -> mesh a -> mesh b -> one device; weights, averages and step."""
    if not experts:
        a, b = ((*mesh[:4], 1, mesh[5]) for mesh in (a, b))
    tied = tied and 3 not in (a[5], b[5])
    folders = [tmp_path_factory.mktemp("mesh") for _ in range(3)]
    options = {"tied": tied, "experts": experts}
    parts, told = state_on_one_device(transformer(seed % 99, **options))
    checkpoint.save(folders[0], parts, 9, about={"optimizer": told})
    for source, target, mesh in zip(folders, folders[1:], (a, b), strict=False):
        ranks = cluster(int(np.prod(mesh[:4])), "thread")
        ranks.run(save_on, source, target, mesh, options)
    found = [checkpoint.load(folder) for folder in folders]
    assert found[0][1] == found[1][1] == found[2][1] == 9
    assert len(found[0][0]) == 3 * len(transformer(**options).named_parameters())
    for state, _ in found[1:]:
        assert_same_bits(dict(sorted(state.items())), dict(sorted(found[0][0].items())))
    assert all(Saved.newest(folder).about == {"optimizer": told} for folder in folders)


# What else cuts a model: ZeRO's stages, a pipeline, matrices alone. Frozen parameters, too.


def zero(group, model, stage):
    held = Zero(model.flatten(group.empty), group, stage)

    def step(optimizer, mine):
        held.accumulate(nn.cross_entropy(model(TOKENS[mine]), TOKENS[mine], TOKENS.size))
        held.step(optimizer)

    return model, adamw(held), step


def pipeline(group, model, stage):
    held = Pipeline(model, group, "zb_v", 3)

    def step(optimizer, mine):
        held.backward(Batch(TOKENS, TOKENS))
        optimizer.step()
        optimizer.zero_grad()

    return held, adamw(held), step


def one_device(group, model, stage):
    def step(optimizer, mine):
        nn.cross_entropy(model(TOKENS), TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, adamw(model), step


def matrices(group, model, stage):
    held = ParallelTransformer(model, group)
    return held, adamw(held), None


CUTS = {"zero_1": (zero, 1), "zero_2": (zero, 2), "zero_3": (zero, 3), "zb_v": (pipeline, 0)}
CUTS |= {"one device": (one_device, 0), "matrices": (matrices, 0)}


def frozen_transformer():
    model = nn.Transformer(11, 6, 3, 4, 5, 0, "float64")
    return model.freeze("blocks.1.expand.weight", "blocks.2.norm_1.gain")


def go(group, kind, source, target):
    """Load from source, train a step, save in target."""
    build, stage = CUTS[kind]
    holder, optimizer, step = build(group, frozen_transformer(), stage)
    if source is not None:
        restore(Saved.newest(source), holder, optimizer)
    mine = np.array_split(np.arange(len(TOKENS)), group.size)[group.rank]
    if step is not None:
        step(optimizer, mine)
    saved(target, holder, optimizer, optimizer.steps, group)


def test_training_goes_on_under_another_strategy(cluster, tmp_path):
    """A step under each, from the checkpoint of the one before, is a step of one device."""
    source = None
    for i, kind in enumerate(CUTS):
        ranks = 1 if kind == "one device" else 3
        cluster(ranks, "thread").run(go, kind, source, tmp_path / f"{i}")
        source = tmp_path / f"{i}"
    found, steps = checkpoint.load(source)
    model = frozen_transformer()
    _, optimizer, step = one_device(None, model, 0)
    for _ in range(len(CUTS) - 1):
        step(optimizer, None)
    want = {part.cut.name: part.on_host() for part in parts_of(model, optimizer)}
    assert steps == optimizer.steps and found.keys() == want.keys()
    assert (comparison := compare([found], want)).ok, comparison


def test_a_rank_that_updates_nothing_does_not_decide_that_there_is_no_state(cluster, tmp_path):
    """The manifest is the first rank's, and here all parameters of the first stage are frozen."""

    def model():
        whole = nn.Transformer(11, 12, 6, 1, 5, 0, "float64")
        return whole.freeze(*(name for name in whole.named_parameters() if "head" not in name))

    def go_on(group, source, target):
        hybrid = on_mesh(group, model(), (1, group.size, 1, 1, 1, 0))
        optimizer = adamw(hybrid)
        if source is None:
            optimizer = stepped(hybrid)
        else:
            restore(Saved.newest(source), hybrid, optimizer)
        saved(target, hybrid, optimizer, 2, group)

    cluster(2, "thread").run(go_on, None, tmp_path / "two")
    cluster(1, "thread").run(go_on, tmp_path / "two", tmp_path / "one")
    (want, _), (found, _) = (checkpoint.load(tmp_path / name) for name in ("two", "one"))
    assert "optimizer.1/head.norm.bias" in want
    assert_same_bits(dict(sorted(want.items())), dict(sorted(found.items())))


def test_a_rank_reads_only_the_files_that_have_its_parts(cluster, tmp_path):
    mesh = (1, 3, 1, 1, 1, 0)

    def worker(group, load):
        hybrid = on_mesh(group, transformer(), mesh)
        optimizer = adamw(hybrid)
        if not load:
            return saved(tmp_path, hybrid, optimizer, 1, group)
        found = Saved.newest(tmp_path)
        restore(found, hybrid, optimizer)
        return list(found.opened)

    cluster(3, "thread").run(worker, False)
    found = cluster(3, "thread").run(worker, True)
    assert found == [[f"rank-00{rank}.safetensors"] for rank in range(3)]


A = nn.Slice("a", (12,), None, 0, 12)


@pytest.mark.parametrize("zero", [0, 1])
def test_every_element_is_written_once(cluster, tmp_path, zero):
    def worker(group):
        hybrid = on_mesh(group, transformer(experts=0), (2, 1, 1, 2, 1, zero))
        checkpoint.save(tmp_path, parts_of(hybrid, stepped(hybrid, 1)), 2, group)

    cluster(4, "thread").run(worker)
    found = Saved.newest(tmp_path)
    for name, shape in found.shapes.items():
        cuts = [slice_of(described, shape) for _, _, described in found.stored[name]]
        positions = np.concatenate([cut.positions() for cut in cuts])
        assert sorted(positions[positions >= 0]) == list(range(np.prod(shape))), name


# What is refused.


@pytest.mark.parametrize(
    "depth, width, dtype, kind, message",
    [
        (2, 6, "float32", optim.AdamW, "has no array blocks.1.norm_1.gain: it is of another"),
        (1, 9, "float32", optim.AdamW, r"is \[11, 6\] in .*, and \[11, 9\] in the model"),
        (1, 6, "float16", optim.AdamW, "is float16 in the model, and would round the float32"),
        (1, 6, "float32", optim.SGD, "has the state of AdamW, not of SGD; go on with AdamW"),
    ],
)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused(
    tmp_path, depth, width, dtype, kind, message
):
    whole = nn.Transformer(11, 6, 3, 1, 5)
    saved(tmp_path, whole, adamw(whole), 1)
    model = nn.Transformer(11, width, 3, depth, 5, 1, dtype)
    optimizer = kind(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        restore(Saved.newest(tmp_path), model, optimizer)


def test_a_part_that_no_file_holds_is_missed(tmp_path):
    model = nn.MLP([6, 2])
    parts = parts_of(model, adamw(model))
    cut, values = parts[0].cut, parts[0].values.reshape(-1)
    parts[0] = checkpoint.Part(cut.within(0, 7), values[:7])
    with pytest.raises(ValueError, match=r"not hold all 12 elements of layers\.0\.weight"):
        checkpoint.save(tmp_path, parts, 1)
    checkpoint.save(tmp_path, [*parts, checkpoint.Part(cut.within(7, 12), values[7:])], 1)
    path = tmp_path / "step-00000001" / "manifest.json"
    found = manifest.read(path)
    del found["files"]["rank-000.safetensors"]["holds"]["layers.0.weight#1"]
    path.write_bytes(manifest.encode(found))
    with pytest.raises(ValueError, match=r"step-00000001 lack 5 elements of layers\.0\.weight"):
        checkpoint.load(tmp_path)


def test_an_element_that_several_slices_have_is_taken_from_the_first_one():
    found = pieces(A.within(1, 12), [A.within(0, 5), A.within(2, 4), A.within(3, 9)])
    assert [(p.number, p.taken.tolist(), p.places.tolist()) for p in found] == [
        (0, [1, 2, 3, 4], [0, 1, 2, 3]),
        (2, [2, 3, 4, 5], [4, 5, 6, 7]),
    ]  # and the last three are nowhere


def test_a_trained_mesh_saves_what_its_state_is(cluster, tmp_path):
    def worker(group):
        hybrid = on_mesh(group, transformer(), (1, 2, 1, 2, 1, 0))
        checkpoint.save(tmp_path, parts_of(hybrid, stepped(hybrid)), 2, group)
        return hybrid.state()

    (state, *_) = cluster(4, "thread").run(worker)
    found, _ = checkpoint.load(tmp_path)
    assert_same_bits({name: found[name] for name in state}, state)
    assert any(array.any() for name, array in found.items() if name.startswith("optimizer.1/"))
