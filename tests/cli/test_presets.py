"""Strategies by name: the meshes they make, and what the command prints of them."""

import pytest

from minidist.cli import main
from minidist.training.presets import ALONE, PRESETS, chosen, mesh_of
from minidist.verify.strategies import STRATEGIES


def test_presets_are_named_like_the_strategies_they_show():
    assert set(PRESETS) - set(STRATEGIES) == {"tensor"}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12])
def test_a_preset_uses_all_ranks(name, ranks):
    preset = chosen(name, ranks, {})
    assert preset["dp"] * preset["pp"] * preset["tp"] == ranks and preset["cp"] == 1


DEALT = {1: (1, 1, 1), 2: (2, 1, 1), 3: (3, 1, 1), 4: (2, 2, 1), 6: (3, 2, 1), 8: (2, 2, 2)}
DEALT |= {12: (3, 2, 2), 16: (4, 2, 2), 30: (5, 3, 2)}


@pytest.mark.parametrize("ranks, sizes", DEALT.items())
def test_the_hybrid_deals_prime_factors(ranks, sizes):
    assert tuple(mesh_of(ranks).values()) == sizes


def test_an_axis_that_agrees_with_the_preset_is_no_contradiction():
    asked = {"pp": 4, "schedule": "gpipe", "zero": 0, "width": 8}
    assert chosen("gpipe", 4, asked) == ALONE | {"pp": 4, "schedule": "gpipe"}


def test_the_command_trains_with_a_preset_and_shows_its_mesh(capsys):
    arguments = "--data numbers --strategy hybrid --ranks 8 --steps 2 --width 8 --batch 8"
    assert main(["train", *arguments.split(), "--transport", "thread", "--sample", "1"]) == 0
    out = capsys.readouterr().out
    assert "8 ranks, 2 x 2 x 2 (data, pipeline, tensor), for batches of 8 pairs" in out
    assert "certificate: ok. 8 ranks against one device" in out


def test_downpour_trains_with_one_server(capsys):
    arguments = "--strategy downpour --replay --sparse --push-every 2 --steps 2 --width 8"
    small = "--context 8 --transport thread --sample 0"
    assert main(["train", *arguments.split(), *small.split()]) == 0
    out = capsys.readouterr().out
    assert "\n4 ranks, 1 of them a server, the others each with a part" in out
    assert "\nreplay of the servers' logs: the same bits in all " in out
    assert "\ncertificate: ok. 4 ranks against one device" in out


def test_the_help_says_what_each_preset_splits(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    for name, preset in PRESETS.items():
        assert f"{name}: {preset.splits}" in words
