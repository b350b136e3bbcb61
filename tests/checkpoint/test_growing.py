"""A run that goes on with another text, more characters, more blocks."""

from dataclasses import replace

import numpy as np
import pytest

from minidist import nn
from minidist.checkpoint import Keep, Saved
from minidist.nn.datasets import Text
from minidist.training.kinds import model_of
from minidist.training.loop import train
from minidist.training.settings import Settings
from tests.strategies import assert_same_bits

SETTINGS = Settings(steps=3, batch=6, context=8, width=12, micro_batches=1)
TEXT = Text(np.random.default_rng(0).integers(0, 5, 400), "bcdfg", "five characters")
OTHER = Text(np.random.default_rng(1).integers(0, 4, 400), "aceh", "others").including("bcdfg")


def grown(cluster, folder, text, more, mesh=None, **options):
    """Train, then go on with something larger for no step at all; return both states."""
    settings = replace(SETTINGS, **options)
    before = cluster(1, "thread").run(train, TEXT, settings, Keep(str(folder)))[0][1]
    settings = replace(settings, steps=0, **more, **(mesh or {}))
    keep = Keep(str(folder), resume=True)
    return before, cluster(settings.ranks, "thread").run(train, text, settings, keep)[0][1]


@pytest.mark.parametrize("experts, tied", [(0, True), (3, False)])
def test_more_blocks_leave_every_bit_of_the_logits(cluster, tmp_path, experts, tied):
    options = {"experts": experts, "tied": tied}
    before, after = grown(cluster, tmp_path, TEXT, {"depth": 4}, **options)
    logits = []
    for depth, state in ((2, before), (4, after)):
        model = model_of(TEXT, replace(SETTINGS, depth=depth, **options))
        model.load_state(state)
        logits.append(model(TEXT.tokens[:80].reshape(10, 8)).data)
    np.testing.assert_array_equal(*logits)
    assert all(np.array_equal(after[name], array) for name, array in before.items())
    assert after["blocks.3.attention.qkv.weight"].any()  # only what writes is 0


@pytest.mark.parametrize("tied", [False, True])
def test_old_characters_keep_their_rows_and_new_ones_are_drawn_by_name(cluster, tmp_path, tied):
    before, after = grown(cluster, tmp_path, OTHER, {}, tied=tied)
    assert OTHER.characters == "abcdefgh" and OTHER.decode(OTHER.tokens[:9]).strip("aceh") == ""
    old = [OTHER.characters.index(c) for c in TEXT.characters]
    rows = {"embedding.token.weight": 0} | ({} if tied else {"head.linear.weight": 1})
    for name, array in before.items():
        kept = after[name] if name not in rows else after[name].take(old, axis=rows[name])
        np.testing.assert_array_equal(kept, array, err_msg=name)
    fewer = Text(np.zeros(80, int), "a", "only a").including("bcdfg")
    again = grown(cluster, tmp_path / "fewer", fewer, {}, tied=tied)[1]
    for name, axis in rows.items():
        new = [after[name].take(i, axis=axis) for i in (0, 4, 7)]
        assert len({row.tobytes() for row in new}) == 3 and all(row.any() for row in new)
        scale = before[name].std() / np.std(new)
        assert 0.4 < scale < 2.5
    row = again["embedding.token.weight"][0]
    fresh = nn.Transformer(6, 12, 4, 1, 8).state()["embedding.token.weight"].std()
    both = row / fresh, after["embedding.token.weight"][0]
    assert np.corrcoef(*both)[0, 1] > 0.999  # whatever other characters there are


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "zero": 1}, {"pp": 2}], ids=str)
def test_every_mesh_begins_with_the_same_larger_model(cluster, tmp_path, mesh):
    want = grown(cluster, tmp_path / "one", OTHER, {"depth": 3})[1]
    assert_same_bits(grown(cluster, tmp_path / "many", OTHER, {"depth": 3}, mesh)[1], want)


LLAMA = {"model": "llama", "width": 16, "heads": 4, "kv_heads": 2}  # tp=4: two ranks share a head


@pytest.mark.parametrize(
    "mesh, tied", [({"tp": 4}, True), ({"pp": 2, "tp": 2}, False), ({"dp": 2, "zero": 1}, True)]
)
def test_a_llama_goes_on_with_every_bit_on_every_mesh_and_grows(cluster, tmp_path, mesh, tied):
    options = LLAMA | {"tied": tied}
    before, after = grown(cluster, tmp_path / "as it is", TEXT, {}, mesh, **options)
    assert_same_bits(after, before)
    want = grown(cluster, tmp_path / "one", OTHER, {"depth": 3}, **options)[1]
    assert want["blocks.2.attention.key_value.weight"].any()
    assert not want["blocks.2.attention.output.weight"].any()
    more = {"depth": 3}
    assert_same_bits(grown(cluster, tmp_path / "many", OTHER, more, mesh, **options)[1], want)


def test_the_steps_begin_again_and_go_on_after_the_old_ones(cluster, tmp_path):
    settings, keep = replace(SETTINGS, dp=2), Keep(str(tmp_path), every=2)
    run = cluster(2, "thread").run
    run(train, TEXT, settings, keep)
    keep = replace(keep, resume=True)
    larger = replace(settings, depth=3)
    losses, state = run(train, OTHER, larger, keep)[0]
    assert len(losses) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005", "step-00000006"]
    assert Saved.newest(tmp_path).about["began"] == 3
    again = run(train, OTHER, larger, keep)[0]  # all is done: it neither grows nor trains
    assert again[0] == losses
    assert_same_bits(again[1], state)
