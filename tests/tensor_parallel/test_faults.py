"""Mistakes of matrix splits and meshes: each must turn the matching comparison red."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from minidist import nn, optim
from minidist.errors import RankFailed
from minidist.tensor_parallel import ColumnParallelLinear
from minidist.tools import equivalence, strategies
from tests.planted import mistaken
from tests.strategies import arrays
from tests.tensor_parallel.judges import (
    config_of,
    judge_layers,
    judge_transformer,
    judge_translator,
)
from tests.tensor_parallel.test_parallel_transformer import train_some_steps
from tests.test_collective_functions import adjoint
from tests.test_hybrid import three_steps

MATRICES = ["f_missing", "f_averages", "f_and_g_swapped", "qkv_in_equal_runs", "qkv_heads_first"]
MATRICES += ["bias_added_tp_times", "bias_missing"]
SEQUENCE = ["layer_norm_not_reduced", "positions_not_summed", "masks_by_local_position"]
SEQUENCE += ["first_positions_everywhere", "sequence_gradient_not_summed"]
SEQUENCE += ["sequence_not_gathered_again", "qkv_in_equal_runs"]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "kind, name",
    [("matrices", name) for name in MATRICES] + [("sequence", name) for name in SEQUENCE],
)
def test_a_mistake_in_a_split_transformer_is_found(cluster, kind, name, size):
    config = config_of(heads=6, width=12)
    found = cluster(size).run(mistaken(name, judge_transformer), kind, config, 12)
    assert any(comparison.error > 1e-3 for comparison in found), found
    sound = cluster(size).run(judge_transformer, kind, config, 12)  # and the mistake is gone again
    assert all(comparison.ok for comparison in sound)


@pytest.mark.parametrize("name", ["key_value_in_one_run", "bias_added_tp_times", "f_missing"])
def test_a_mistake_in_a_split_seq2seq_is_found(cluster, name):
    found = cluster(2).run(mistaken(name, judge_translator), "matrices", 6)
    assert any(comparison.error > 1e-3 for comparison in found), found


def test_a_table_of_the_other_vocabulary_is_found_by_its_rows(cluster):
    """Whose name is said: what the source asks for is no row of the target's table."""
    with pytest.raises(RankFailed, match=r"outside .* 11, the rows of embedding\.target\.token"):
        cluster(2).run(mistaken("vocabularies_swapped", judge_translator), "vocab", 6)


def columns_gathered(group):
    build = partial(nn.Linear, 3, 12, dtype="float64")
    split = partial(ColumnParallelLinear, gather_output=True)
    return judge_layers(group, build, split, arrays(4, 3), 0)


def test_a_gathered_output_whose_gradient_is_summed_is_n_times_too_large(cluster):
    for comparison in cluster(3).run(mistaken("gather_sums_backward", columns_gathered)):
        assert not comparison.ok and comparison.ratio == pytest.approx(3)
    assert all(comparison.ok for comparison in cluster(3).run(columns_gathered))


@pytest.mark.parametrize(
    "pair, name",
    [
        ("all_gather", "all_gather_takes_its_part"),
        ("gather", "gather_sums_backward"),
        ("copy_to", "f_missing"),
        ("copy_to", "f_averages"),
        ("reduce_scatter", "reduce_scatter_hands_back_its_part"),
    ],
)
def test_a_backward_that_is_not_the_adjoint_is_found(cluster, pair, name):
    found = cluster(2).run(mistaken(name, adjoint), pair, [4, 6], 1, 0, 3)
    for forward, backward, _ in found:
        assert not abs(forward - backward) < 1e-3


@pytest.mark.parametrize("kind", ["matrices", "sequence"])
@pytest.mark.parametrize("name", ["padding_gets_a_gradient", "padding_in_the_vocabulary"])
def test_padding_that_learns_is_found(cluster, kind, name):
    rule = partial(optim.SGD, lr=0.1)
    found = cluster(4).run(mistaken(name, train_some_steps), kind, rule, 5, False)
    assert max(largest for _, largest, _ in found) > 1e-3


def worst(found):
    """Return the largest errors of gradients, norms and weights over ranks and steps."""
    steps = [row for rows, _ in found for row in rows]
    return (
        max(comparison.error for comparison, _, _ in steps),
        max(abs(norm) for _, _, norm in steps),
        max(weights.error for _, weights in found),
    )


ON_THE_MESH = [
    ("tied_embedding_summed_twice", (1, 2, 1, 1, 1)),
    ("tied_embedding_summed_twice", (1, 2, 1, 2, 1)),
    ("untied_embedding", (1, 2, 1, 2, 1)),
    ("averaged_over_dp", (2, 1, 1, 2, 1)),
    ("averaged_over_tp", (2, 1, 1, 2, 1)),
    ("scaled_at_every_stage", (1, 2, 1, 1, 1)),
    ("mean_of_means", (2, 1, 1, 1, 1)),
    ("masks_by_local_example", (2, 1, 1, 1, 1)),
    ("f_averages", (1, 2, 1, 2, 1)),
]


@pytest.mark.parametrize("name, mesh", ON_THE_MESH)
def test_a_mistake_on_the_mesh_is_found_in_the_gradients(cluster, name, mesh):
    """Not always in the weights: clipping and AdamW do not see a common factor."""
    found = cluster(int(np.prod(mesh))).run(mistaken(name, three_steps), mesh, {}, True)
    gradients, norms, _ = worst(found)
    assert gradients > 1e-3 and norms > 1e-3


@pytest.mark.parametrize(
    "name, mesh",
    [
        ("local_norm", (1, 2, 1, 1, 1)),
        ("local_norm", (1, 1, 1, 2, 1)),
        ("local_norm", (2, 1, 1, 2, 1)),
        ("copies_on_pp_count_in_the_norm", (1, 2, 1, 1, 1)),
        ("copies_on_tp_count_in_the_norm", (1, 1, 1, 2, 1)),
        ("copies_on_tp_count_in_the_norm", (2, 1, 1, 2, 1)),
    ],
)
def test_a_wrong_norm_is_found_though_the_first_gradients_are_right(cluster, name, mesh):
    found = cluster(int(np.prod(mesh))).run(mistaken(name, three_steps), mesh, {}, True)
    assert all(rows[0][0].ok for rows, _ in found)
    _, norms, weights = worst(found)
    assert norms > 1e-3 and weights > 1e-6


@pytest.mark.parametrize("name, options", [("row", {}), ("hybrid", {"dp": 1, "tp": 2})])
def test_verify_sees_a_bias_that_every_rank_adds(cluster, monkeypatch, name, options):
    """Its models have random biases: new ones are zeros, and zeros may be added twice."""
    sound = strategies.STRATEGIES[name]
    case = sound.cases(2)[0]
    faulty = mistaken("bias_added_tp_times", sound.worker)
    for worker in (sound.worker, faulty):
        monkeypatch.setitem(strategies.STRATEGIES, name, replace(sound, worker=worker))
        row = equivalence.check(name, replace(case, options=options), 2, cluster(2))
        assert row["ok"] == (worker is sound.worker), row
