"""Asynchronous pipelines: the versions used, how many are kept, and a replay to the bit."""

import copy
import weakref
from dataclasses import replace
from itertools import product
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import nn, optim
from minidist.nn.datasets import Batch
from minidist.pipeline_parallel import PipeDream, programs
from minidist.pipeline_parallel.actions import Update, last_stage
from minidist.pipeline_parallel.holders import cut_of
from minidist.verify.strategies import Case
from minidist.verify.strategies.pipedream import replay
from tests.pipeline_parallel.training import micro_batches_of
from tests.strategies import arrays, assert_same_bits, cuts, seeds

SCHEMES = ("weight_stashing", "vertical_sync", "2bw")


def momentum(parameters):
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def mlp_case(layers, examples, seed=0):
    widths = [4, *(3 + i % 3 for i in range(layers - 1)), 3]
    model = nn.MLP(widths, "gelu", seed=seed % 100, dtype="float64")
    targets = np.random.default_rng(seed).integers(0, 3, examples)
    return Case("MLP", model, arrays(examples, 4, seed=seed), targets)


def transformer_case(layers, examples, seed=0):
    model = nn.Transformer(7, 4, 2, layers - 2, 3, seed=seed % 100, dtype="float64", dropout=0.3)
    tokens, targets = np.random.default_rng(seed).integers(0, 7, (2, examples, 3))
    return Case("Transformer", model, tokens, targets, seed=seed)


def stream_of(case, count):
    """Cut the examples into minibatches, each of which divides by its own targets."""
    stream = micro_batches_of(case, count, 0)
    return [replace(part, total=max(1, part.targets.size)) for part in stream]


def train(group, case, scheme, count, optimizer, options):
    """Return what the rank has used and has at the end; and what it kept, counted from outside."""
    pipe = PipeDream(case.model, group, optimizer, scheme, case.loss, **options)
    weights = pipe.stage.weights
    buffers, alive = [weakref.ref(weights.newest)], []

    def watched(method):
        def call(i):
            method(i)
            if not any(ref() is weights.newest for ref in buffers):
                buffers.append(weakref.ref(weights.newest))
            alive.append(sum(ref() is not None for ref in buffers))

        return call

    for name in ("forward", "backward", "update"):
        setattr(pipe.stage, name, watched(getattr(pipe.stage, name)))
    pipe.train(stream_of(case, count))
    return {
        "used": pipe.used,
        "state": pipe.model.state(),
        "most": weights.most,
        "alive": max(alive, default=1),
    }


def bare_programs(p, scheme, count, options):
    more = {k: v for k, v in options.items() if k in ("replicas", "update_every")}
    return programs("pipedream_2bw" if scheme == "2bw" else "pipedream", p, count, **more)


def run_and_replay(ranks, case, scheme, count, optimizer=momentum, **options):
    """Train on real ranks; return (what the ranks found, the weights, the replay's weights)."""
    found = ranks.run(train, case, scheme, count, optimizer, options)
    bare = bare_programs(ranks.size, scheme, count, options)
    stages = 1 + last_stage(bare.placement)
    versions, updates = [{} for _ in range(stages)], [[] for _ in range(stages)]
    for (k,), mine, program in zip(bare.placement, found, bare, strict=True):
        updates[k] = [a.micro_batch for a in program if isinstance(a, Update)]
        versions[k] |= {b: version for letter, b, version in mine["used"] if letter == "F"}
    cut = cut_of(len(case.model.layers), stages, options.get("cut"))
    stream = stream_of(case, count)
    want = replay(case.model, cut, stream, versions, updates, optimizer, case.loss)
    weights = {}
    for mine in found:
        for name, array in mine["state"].items():
            np.testing.assert_array_equal(weights.setdefault(name, array), array, err_msg=name)
    return found, weights, want


def formula(scheme, b, p, s, every):
    if scheme == "weight_stashing":
        return max(0, b - (p - 1 - s))
    return max(0, b - (p - 1)) if scheme == "vertical_sync" else max(0, b // every - 1)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("p", [1, 2, 3])
def test_versions_are_those_of_the_formula_for_both_passes_and_the_replay_has_the_same_bits(
    cluster, scheme, p
):
    ranks = cluster(p, "process" if p == 3 else "thread")
    for count, optimizer in ((1, momentum), (13, adam)):
        every = max(1, p - 1)
        options = [{}] if scheme != "2bw" else [{}, {"update_every": every + 1}]
        for more, case in product(options, (mlp_case(p + 1, 17), transformer_case(p + 1, 14))):
            found, got, want = run_and_replay(ranks, case, scheme, count, optimizer, **more)
            k = more.get("update_every", every)
            for stage, mine in enumerate(found):
                where = f"{scheme}, stage {stage} of {p}, {case.name}, {count} minibatches"
                for letter, b, version in mine["used"]:
                    due = formula(scheme, b, p, stage, k)
                    assert version == due, f"{where}: {letter}{b} with version {version}"
                letters = sorted((letter, b) for letter, b, _ in mine["used"])
                assert letters == [(x, b) for x in "BF" for b in range(count)]
            assert_same_bits(got, {name: want[name] for name in got})
            assert got.keys() == want.keys()


@settings(max_examples=15)
@given(
    p=st.integers(1, 4),
    scheme=st.sampled_from(SCHEMES),
    count=st.integers(1, 12),
    data=st.data(),
    seed=seeds,
    optimizer=st.sampled_from([momentum, adam]),
)
def test_the_replay_has_the_same_bits_for_any_model_and_cut(
    cluster, p, scheme, count, data, seed, optimizer
):
    layers = max(2, p) + data.draw(st.integers(0, 2))
    make = data.draw(st.sampled_from([mlp_case, transformer_case]))
    case, cut = make(layers, data.draw(st.integers(1, 20)), seed), data.draw(cuts(layers, p))
    first = [q.name for i in cut[0] for q in case.model.layers[i].parameters()]
    frozen = data.draw(st.sampled_from([0, 1, len(first) if p > 1 else 1]))  # or a whole stage
    if frozen:
        case.model.freeze(*first[:frozen])
    more = {}
    if scheme == "2bw":
        more["update_every"] = max(1, p - 1) + data.draw(st.integers(0, 3))
    _, got, want = run_and_replay(cluster(p), case, scheme, count, optimizer, cut=cut, **more)
    assert_same_bits(got, want)


@pytest.mark.parametrize("p", [1, 3])
def test_stashing_keeps_as_many_versions_as_stages_are_left_and_2bw_two(cluster, p):
    case, count = mlp_case(p, 14), 14
    for scheme, want in (
        ("weight_stashing", [p - s for s in range(p)]),
        ("vertical_sync", [p] * p),
        ("2bw", [2] * p),
        ("none", [1] * p),
    ):
        found = cluster(p).run(train, case, scheme, count, momentum, {})
        assert [mine["alive"] for mine in found] == want, scheme
        assert [mine["most"] for mine in found] == want, scheme


def test_without_stashing_backward_uses_other_weights_than_forward_and_is_no_gradient(cluster):
    case = mlp_case(4, 14)
    found, got, want = run_and_replay(cluster(3), case, "none", 14)
    for s, mine in enumerate(found):
        forward = {b: version for letter, b, version in mine["used"] if letter == "F"}
        backward = {b: version for letter, b, version in mine["used"] if letter == "B"}
        assert forward == {b: max(0, b - (2 - s)) for b in range(14)}
        assert backward == {b: b for b in range(14)}
    differing = {name for name in want if not np.array_equal(got[name], want[name])}
    assert differing and max(np.abs(got[name] - want[name]).max() for name in want) > 1e-3
    _, got, want = run_and_replay(cluster(1), case, "none", 14)
    assert_same_bits(got, want)  # of one stage each minibatch ends before the next one begins


@pytest.mark.parametrize("replicas", [[2], [2, 1], [1, 2], [1, 1, 2]], ids=str)
def test_replicas_take_turns_and_sum_what_a_round_brings(cluster, replicas):
    """1F1B-RR: replica b mod k, forward and backward; also where k does not divide m."""
    p = sum(replicas)
    for count, optimizer in ((1, momentum), (7, adam)):
        for case in (mlp_case(len(replicas) + 1, 11), transformer_case(len(replicas) + 1, 9)):
            found, got, want = run_and_replay(
                cluster(p), case, "weight_stashing", count, optimizer, replicas=replicas
            )
            ranks = iter(found)
            for s, k in enumerate(replicas):
                in_flight = ceil(sum(replicas[s:]) / k)
                for replica in range(k):
                    used = next(ranks)["used"]
                    assert {b % k for _, b, _ in used} <= {replica}
                    assert len(used) == 2 * len(range(replica, count, k))
                    for _, b, version in used:
                        assert version == max(0, b // k - (in_flight - 1))
            assert_same_bits(got, want)


def test_2bw_is_gradient_descent_with_a_delay_of_one(cluster):
    """W(t + 1) = W(t) - lr v(t), v(t) = 0.9 v(t - 1) + dL(W(t - 1)): said without any pipeline."""
    case, every, count = mlp_case(4, 12), 3, 12
    _, got, _ = run_and_replay(cluster(3), case, "2bw", count, momentum, update_every=every)
    model = copy.deepcopy(case.model)
    history, velocity = [model.state()], None
    stream = stream_of(case, count)
    for t in range(count // every):
        model.load_state(history[max(0, t - 1)])
        for part in stream[t * every : (t + 1) * every]:
            nn.cross_entropy(model(part.inputs), part.targets, part.total).backward()
        gradient = {name: p.grad.copy() for name, p in model.named_parameters().items()}
        velocity = {n: g + 0.9 * (velocity[n] if velocity else 0) for n, g in gradient.items()}
        history.append({n: w - 0.1 * velocity[n] for n, w in history[-1].items()})
        for p in model.parameters():
            p.grad = None
    for name, array in history[-1].items():
        np.testing.assert_allclose(got[name], array, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_versions_are_counted_in_integers_whatever_the_weights_are(cluster, scheme, dtype):
    """2048 + 1 is 2048 in float16, and 16777216 + 1 is 16777216 in float32."""
    before = 2046 if dtype == "float16" else (1 << 24) - 2

    def worker(group):
        model = nn.MLP([4, 4, 2], dtype=dtype)
        pipe = PipeDream(model, group, lambda p: optim.SGD(p, 0.01), scheme)
        pipe.stage.weights.newest.number = before  # updates applied so far
        pipe.train(Batch(np.ones((8, 4), dtype), np.zeros(8, int)).micro_batches(8))
        return pipe.stage.weights.version, [version for _, _, version in pipe.used]

    for version, used in cluster(2, "thread").run(worker):
        assert version == before + 8
        assert sorted(set(used))[-1] >= before + 6 and min(used) == before
