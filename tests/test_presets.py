"""Strategies by name: the meshes they make, and that each is certified and learns the same."""

import numpy as np
import pytest

from minidist.cli import main
from minidist.cli.presets import ALONE, PRESETS, chosen, mesh_of
from minidist.datasets import Text, numbers
from minidist.kinds import model_of
from minidist.settings import Settings
from minidist.tools.certificate import certify
from minidist.tools.strategies import STRATEGIES
from minidist.train import train

TEXT = Text(np.random.default_rng(0).integers(0, 5, 400), "abcde", "five characters")
NUMBERS = numbers(examples=60, held_out=9)
MESHES = [name for name, preset in PRESETS.items() if not preset.servers]
DATA = {"text": TEXT, "numbers": NUMBERS}


def settings(name, ranks, data="numbers"):
    more = {"context": 8} if data == "text" else {}
    return Settings(
        steps=4, batch=16, width=8, depth=2, dropout=0.1, **more, **chosen(name, ranks, {})
    )


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


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_certified(name, data):
    chosen = settings(name, 4, data)
    servers = PRESETS[name].servers
    row = certify(model_of(DATA[data], chosen), DATA[data], chosen, "thread", servers=servers)
    assert row["ok"], row["detail"]
    assert row["ranks"] == 4 and (row["strategy"] == "parameter_server") == (servers > 0)


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_translates_what_one_rank_translates(cluster, name):
    """The losses of a run are those of one rank, to rounding in float32."""
    (want, weights), *_ = cluster(1, "thread").run(train, NUMBERS, settings("naive", 1))
    results = cluster(4, "thread").run(train, NUMBERS, settings(name, 4))
    for losses, state in results:
        np.testing.assert_allclose(losses, want, rtol=1e-5)
        assert state.keys() == weights.keys()
    assert want[-1] < want[0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("naive --pp 2", "--strategy naive on 4 ranks has pp=1, not 2; leave --pp or --strategy"),
        ("gpipe --schedule 1f1b", "--strategy gpipe on 4 ranks has schedule=gpipe, not 1f1b"),
        ("zero_1 --zero 0", "--strategy zero_1 on 4 ranks has zero=1, not 0"),
        ("tensor --ranks 2 --tp 4", "--strategy tensor on 2 ranks has tp=2, not 4"),
        ("hybrid --cp 2", "--strategy hybrid on 4 ranks has cp=1, not 2"),
        ("1f1b --ranks 9", "cannot cut 6 layers into 9 stages; use at most 6"),
        (
            "downpour --pp 2",
            "--strategy downpour and --pp do not go together: every worker has all",
        ),
        ("downpour --dp 4", "--strategy downpour and --dp do not go together: the workers share"),
        ("downpour --data digits", "--strategy downpour and --data digits do not go together"),
        (
            "downpour --staleness 0",
            "--strategy downpour and --staleness do not go together: its workers wait for nobody; "
            "use --servers 1 in place of --strategy",
        ),
        ("downpour --servers 2 --quorum 2", "--strategy downpour and --quorum do not go together"),
        ("downpour --ranks 1", "1 servers on 1 ranks leave no worker; use 2 ranks or more"),
        ("naive --servers 1", "--strategy naive has no servers; leave --strategy or --servers out"),
        ("1f1b --staleness 2", "--strategy 1f1b has no servers; leave --strategy or --staleness"),
        ("zero_1 --replay", "--strategy zero_1 has no servers; leave --strategy or --replay out"),
        ("tensor --ranks 3", "cannot split 4 heads over 3 ranks; use a multiple of 3"),
    ],
)
def test_a_preset_and_an_axis_that_disagree_are_one_line(capsys, arguments, message):
    command = "train --data numbers --transport thread --strategy"
    assert main([*command.split(), *arguments.split()]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"minidist: {message}") and errors.count("\n") == 1, errors


def test_an_axis_that_agrees_with_the_preset_is_no_contradiction():
    asked = {"pp": 4, "schedule": "gpipe", "zero": 0, "width": 8}
    assert chosen("gpipe", 4, asked) == ALONE | {"pp": 4, "schedule": "gpipe"}


def test_the_command_trains_with_a_preset_and_shows_its_mesh(capsys):
    arguments = "--data numbers --strategy hybrid --ranks 8 --steps 2 --width 8 --batch 8"
    assert main(["train", *arguments.split(), "--transport", "thread", "--sample", "1"]) == 0
    out = capsys.readouterr().out
    assert "8 ranks, 2 x 2 x 2 (data, pipeline, tensor), for batches of 8 pairs" in out
    assert "certificate: ok. 8 ranks against one device" in out


@pytest.mark.parametrize("more, servers", [("", "a server"), ("--servers 2", "servers")])
def test_downpour_trains_with_one_server_or_as_many_as_asked_for(capsys, more, servers):
    arguments = "--strategy downpour --replay --sparse --push-every 2 --steps 2 --width 8"
    small = "--context 8 --transport thread --sample 0 " + more
    assert main(["train", *arguments.split(), *small.split()]) == 0
    out = capsys.readouterr().out
    assert f"\n4 ranks, {1 + bool(more)} of them {servers}, the others each with a part" in out
    assert "\nreplay of the servers' logs: the same bits in all " in out
    assert "\ncertificate: ok. 4 ranks against one device" in out


def test_digits_take_the_preset_that_splits_the_batch_alone(capsys):
    command = "train --data digits --transport thread --steps 2 --strategy"
    assert main([*command.split(), "naive"]) == 0
    assert "4 ranks, each with its part" in capsys.readouterr().out
    assert main([*command.split(), "tensor"]) == 2
    assert "tp is a setting of texts, not of digits" in capsys.readouterr().err


def test_the_help_says_what_each_preset_splits(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    for name, preset in PRESETS.items():
        assert f"{name}: {preset.words}" in words
