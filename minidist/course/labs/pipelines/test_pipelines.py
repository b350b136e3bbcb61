"""Programs of pipelines, their execution, and the versions of weights.

Programs have many right forms: they are validated and simulated here, and have to be as good as the
package's, which reach what the papers' formulas say. Actions travel as rows [kind, micro-batch,
chunk, peer, chunk of the peer]. Letters: p ranks, m micro-batches, v chunks per rank.
"""

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest

from minidist import nn, optim
from minidist.course.answers import check
from minidist.course.inside import inside, task
from minidist.course.labs.drawn import drawn
from minidist.course.labs.ranks import each_rank, refused
from minidist.errors import Deadlock
from minidist.nn.datasets import Batch
from minidist.observe import timeline
from minidist.pipeline_parallel import (
    add_communication,
    executor,
    programs,
    validate,
    weight_stashing,
)
from minidist.pipeline_parallel.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Programs,
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
    Transfer,
    Update,
    looped,
    other_end,
)
from minidist.pipeline_parallel.holders import cut_of
from minidist.pipeline_parallel.stage import Stage
from minidist.planning import simulate

MOST = "the buffers kept at once"
KINDS = [Forward, Backward, BackwardInput, BackwardWeight, Update]
KINDS += [SendActivation, RecvActivation, SendGradient, RecvGradient]


def row(action):
    if type(action) not in KINDS:
        raise TypeError(f"a program has {action!r:.80} in it, which is no action")
    ends = (action.peer, action.peer_chunk) if isinstance(action, Transfer) else (0, 0)
    return KINDS.index(type(action)), action.micro_batch, action.chunk, *ends


def action(numbers):
    kind, micro_batch, chunk, *ends = map(int, numbers)
    return KINDS[kind](micro_batch, chunk, *(ends if kind > 4 else ()))


def written(made):
    """Return each rank's actions as rows."""
    rows = ([row(action) for action in actions] for actions in made)
    return [{"the program": np.array(own, np.int64).reshape(-1, 5)} for own in rows]


def read(rows, placement):
    return Programs([[action(numbers) for numbers in own] for own in rows], placement)


@inside(any_form=True)
def schedule(name, p, m, chunks=1, **options):
    return written(programs(name, p, m, chunks, **options))


@inside
def refusal(name, p, m, chunks):
    """Return whether programs that cannot be are refused."""
    return {"refused": refused(programs, name, p, m, chunks)}


@inside(any_form=True)
def transfers(rows, placement, rendezvous_safe):
    return written(add_communication(read(rows, placement), rendezvous_safe))


@inside
def transfers_twice(rows, placement):
    return {"refused": refused(add_communication, read(rows, placement))}


@inside
def tags(rows, placement):
    """Return the tags of each rank's transfers, in the order of its program, and what is wrong."""
    made, different, taken = read(rows, placement), [], Counter()
    moves = [[a for a in own if isinstance(a, Transfer)] for own in made]
    for r, own in enumerate(moves):
        for a in own:
            if isinstance(a, SendActivation | SendGradient):
                taken[r, a.peer, executor.tag(a)] += 1
                if executor.tag(other_end(a, r)) != executor.tag(a):
                    different.append(f"{a} of rank {r}")
    twice = [f"{tag} from rank {r} to {s}" for (r, s, tag), n in taken.items() if n > 1]
    found = {f"the tags on rank {r}": [executor.tag(a) for a in own] for r, own in enumerate(moves)}
    return {name: np.array(own, np.int64) for name, own in found.items()} | {
        "the sends whose receive has another tag": np.array(different[:3], str),
        "the tags that two sends have": np.array(twice[:3], str),
    }


class Counted(Stage):
    """A stage that writes down when it was asked to update."""

    def begin(self, batch):
        super().begin(batch)
        self.updates = []

    def update(self, i):
        self.updates.append(i)


@inside
@each_rank("rows", len)
def train(group, rows, placement, sizes, cut, state, inputs, targets, m):
    """Return per rank the gradients, the loss, the bytes sent, and the updates."""
    made, last = read(rows, placement), len(cut) - 1
    model = nn.MLP(sizes, "gelu", dtype="float64")
    model.load_state(state)
    own = [model.layers[a:b] for a, b in cut]
    stages = [Counted(own[k], k == 0, k == last) for k in made.placement[group.rank]]
    for stage in stages:
        stage.begin(Batch(inputs, targets).micro_batches(m))
    executor.execute(made[group.rank], group, stages)
    found = {p.name: p.grad for stage in stages for p in stage.parameters()}
    found["the loss"] = sum(sum(stage.losses.values()) for stage in stages)
    found["sent"] = group.ledger.total
    found["the updates"] = np.array([i for stage in stages for i in stage.updates], int)
    return found


@inside
def chosen(scheme, p, every, minibatches, newest):
    """Return the version that a forward pass chooses, for each minibatch and newest version."""
    choose = getattr(weight_stashing, scheme)
    return {
        f"the versions of minibatch {b}, newest {newest}": [choose(b, v, p, every) for v in newest]
        for b in minibatches
    }


@inside
def versions(scheme, p, every, events, weights, gradients, lr, stash, streams):
    """Return the weights that each event found, those that its graph held, and the records.

    events  [kind, minibatch]: "F", "B" or "U"; the same ones in each of `streams` streams
    """
    model = nn.MLP([len(weights[0]), len(weights[1])], dtype="float64")
    w, b = model.parameters()
    w.data[...], b.data[...] = weights[0], weights[1]
    choose = partial(getattr(weight_stashing, scheme), p=p, every=every)
    kept = weight_stashing.WeightVersions([w, b], partial(optim.SGD, lr=lr), choose, stash)
    graphs, found = {}, {}
    for stream in range(streams):
        kept.begin(1 + max(i for _, i in events))
        for kind, i in events:
            event = f"{kind}{i} of stream {stream}"
            if kind == "F":
                kept.forward(i)
                graphs[i] = w.data
            elif kind == "B":
                kept.backward(i)
                found[f"what F{i} was given, at {event},"] = graphs.pop(i).copy()
                w.grad = gradients[i] if w.grad is None else w.grad + gradients[i]
            else:
                kept.update()
            found[f"the weights at {event}"] = w.data.copy()
    letters = np.array([letter for letter, *_ in kept.used], str)
    numbers = np.array([rest for _, *rest in kept.used], np.int64).reshape(-1, 2)
    used = {"the letters of `used`": letters, "minibatch and version in `used`": numbers}
    return {**found, **used, MOST: kept.most}


def check_schedule(rng, name, p, m, chunks=1, *, idles_like=None, span=False, exactly=False):
    """Judge a schedule: its ranks idle no longer, and none holds more, than the package's.

    idles_like  other programs than the package's, which may idle longer
    span        idle time is counted from each rank's own start
    exactly     ranks hold no less, either
    """
    f, i, w = rng.integers(3, 9, 3).tolist()
    w = min(f, i, w) - int(rng.integers(0, 3))  # the shortest: there all formulas hold
    times: dict[str, Any] = {"forward": f, "backward_input": i, "backward_weight": w}
    asked = name, p, m, chunks
    made, best = (
        read([own["the program"] for own in answer], looped(p, chunks))
        for answer in (schedule(*asked), schedule.package(*asked))
    )
    check_valid(made, m)
    got, wanted, slow = (simulate(x, **times) for x in (made, best, idles_like or best))
    idle, most = ((x.span if span else x.makespan) - m * sum((f, i, w)) for x in (got, slow))
    pairs = list(zip(got.peak_stash, wanted.peak_stash, strict=True))
    held, room = (", ".join(map(str, x.peak_stash)) for x in (got, wanted))
    unit = "micro-batches" if chunks == 1 else "stages' worth"
    yours = f"yours: a rank idles {idle} units of time, the ranks hold {held} {unit} at their peaks"
    limits = f"wanted: it idles {most}, they hold {room}"
    fits = all(a == b or (a < b and not exactly) for a, b in pairs)
    assert idle <= most and fits, f"{drawn(made, got, times)}\n{yours}\n{limits}"


def check_valid(made, m):
    """Raise what `validate` says, without its picture."""
    try:
        validate(made, len(made), m)
    except ValueError as error:
        raise AssertionError(str(error).splitlines()[0]) from None


FEW, MORE = "one rank, or no more micro-batches than ranks", "more micro-batches than ranks"
SIZES = [(FEW, 1, 4), (FEW, 4, 1), (FEW, 5, 3), (FEW, 3, 3), (MORE, 2, 9), (MORE, 4, 12)]
each_size = pytest.mark.parametrize("group, p, m", SIZES)


@task("4.1")
@each_size
def test_gpipe_fills_and_drains(group, p, m, rng):
    check_schedule(rng, "gpipe", p, m, exactly=True)


@task("4.1")
@pytest.mark.parametrize("p, m, v", [(1, 3, 2), (2, 4, 3), (4, 5, 2)])
def test_gpipe_has_several_chunks(p, m, v, rng):
    check_schedule(rng, "looped_bfs", p, m, v, exactly=True)


@task("4.2")
@each_size
def test_1f1b_holds_no_more_than_it_needs(group, p, m, rng):
    check_schedule(rng, "1f1b", p, m)


@task("4.2")
@pytest.mark.parametrize("replicas", [[2, 1], [1, 3], [2, 3, 1], [1]], ids=str)
def test_replicated_stages_take_turns(replicas, rng):
    options = {"replicas": replicas}
    asked = "pipedream", sum(replicas), int(rng.integers(6, 12))
    check(schedule(*asked, **options), schedule.package(*asked, **options))


ONE, SEVERAL = "one group of micro-batches", "several groups"


@task("4.5")
@pytest.mark.parametrize(
    "group, p, turns, v",
    [(ONE, 1, 3, 2), (ONE, 4, 1, 2), (SEVERAL, 2, 4, 3), (SEVERAL, 3, 2, 3), (SEVERAL, 4, 3, 2)],
)
def test_interleaved_groups_have_p_micro_batches(group, p, turns, v, rng):
    check_schedule(rng, "interleaved", p, p * turns, v)


@task("4.5")
@pytest.mark.parametrize("group", [SEVERAL])
def test_micro_batches_that_make_no_groups_are_refused(group, rng):
    p = int(rng.integers(3, 6))
    refusal.check("interleaved", p, p * int(rng.integers(1, 4)) + int(rng.integers(1, p)), 2)


@task("4.6")
@pytest.mark.parametrize("p, m", [size[1:] for size in SIZES])
@pytest.mark.parametrize("group", ["zb_h1", "zb_h2"])
def test_zero_bubble_fills_bubbles_with_w(group, p, m, rng):
    least = p if group == "zb_h1" else 2 * p - 1
    slow = programs("1f1b", p, m) if m < least else None  # outside of the formula's domain
    check_schedule(rng, group, p, m, idles_like=slow, span=group == "zb_h2")


# Transfers, and their execution: looped, V-shaped and replicated stages.

CHUNK, CHUNKS, REPLICAS = "a chunk per rank", "several chunks", "replicas"
PROGRAMS = [
    (CHUNK, "1f1b", 3, 4, {}),
    (CHUNK, "gpipe", 1, 3, {}),
    (CHUNK, "zb_h2", 4, 2, {}),
    (CHUNKS, "interleaved", 3, 6, {"chunks": 2}),
    (CHUNKS, "interleaved", 2, 4, {"chunks": 3}),
    (CHUNKS, "zb_v", 3, 4, {}),
    (REPLICAS, "pipedream", 6, 7, {"replicas": [3, 1, 2]}),
]
each_program = pytest.mark.parametrize("group, name, p, m, options", PROGRAMS)


def rows(made):
    """Return programs as they travel."""
    return {
        "rows": [[row(a) for a in own] for own in made],
        "placement": [list(own) for own in made.placement],
    }


def with_transfers(made):
    return Programs(add_communication(made), made.placement)


def check_transfers(rng, made, m, safe):
    """Judge transfers: all compute actions as before, no deadlock, and no action later."""
    answers = transfers(**rows(made), rendezvous_safe=safe)
    got = read([own["the program"] for own in answers], made.placement)
    for r, (own, before) in enumerate(zip(got, made, strict=True)):
        same = [a for a in own if not isinstance(a, Transfer)] == before
        assert same, f"rank {r} has other compute actions, or in another order, than before"
    check_valid(got, m)
    try:
        simulate(got, buffer=0 if safe else 1)
    except Deadlock as error:
        waits = "that waits for its receive" if safe else "with room for one message"
        raise AssertionError(f"{error}, each send {waits}") from None
    latency = int(rng.integers(1, 4))
    mine, best = (simulate(x, latency=latency) for x in (got, made))
    end = f"with a latency of {latency} the makespan is {mine.makespan}, not {best.makespan}"
    why = "a receive is earlier, or a send later, than it need be"
    late = f"{timeline.text(mine.timeline)}\n{end}: {why}"
    assert safe or mine.makespan <= best.makespan, late


@task("4.3")
@each_program
def test_transfers_make_nothing_later(group, name, p, m, options, rng):
    check_transfers(rng, programs(name, p, m, **options), m, safe=False)


@task("4.3")
@pytest.mark.parametrize("name, p, m, options", [own[1:] for own in PROGRAMS])
def test_every_send_may_wait_for_its_receive(name, p, m, options, rng):
    check_transfers(rng, programs(name, p, m, **options), m, safe=True)


@task("4.3")
@pytest.mark.parametrize("group", [REPLICAS])
def test_transfers_are_not_added_twice(group):
    transfers_twice.check(**rows(with_transfers(programs("1f1b", 2, 3))))


@task("4.4")
@pytest.mark.parametrize("name, p, m, options", [own[1:] for own in PROGRAMS if own[2] > 1])
def test_a_transfer_and_its_other_end_have_a_tag_of_their_own(name, p, m, options):
    given = rows(with_transfers(programs(name, p, m, **options)))
    check(tags(**given), tags.package(**given), free=("the tags",))


@task("4.4")
@each_program
def test_a_program_leaves_one_devices_gradients(group, name, p, m, options, rng):
    made = programs(name, p, m, **options)
    stages = 1 + max(k for own in made.placement for k in own)
    widths = rng.integers(2, 6, stages + int(rng.integers(1, 3)) + 1).tolist()
    model = nn.MLP(widths, "gelu", dtype="float64")
    B = int(rng.integers(m // 2, 2 * m + 1)) or 1  # some micro-batches may be empty
    train.check(
        **rows(with_transfers(made)),
        sizes=widths,
        cut=[(part.start, part.stop) for part in cut_of(len(model.layers), stages)],
        state={n: rng.standard_normal(q.shape) for n, q in model.named_parameters().items()},
        inputs=rng.standard_normal((B, widths[0])),
        targets=rng.integers(0, widths[-1], B),
        m=m,
    )


# Versions of the weights.

SCHEMES = "newest", "vertical_sync", "double_buffered"


@task("4.7")
@pytest.mark.parametrize("group", SCHEMES)
def test_a_forward_pass_has_the_version_of_its_scheme(group, rng):
    p, every = int(rng.integers(2, 5)), int(rng.integers(3, 6))
    chosen.check(group, p, every, list(range(12)), [0, 3, 20])


@task("4.7")
@pytest.mark.parametrize(
    "group, p, s, m, stash",
    [
        *((scheme, *at, True) for scheme in SCHEMES for at in [(3, 0, 12), (4, 3, 13), (1, 0, 11)]),
        *((scheme, 4, 1, 3, True) for scheme in SCHEMES),
        ("newest", 3, 0, 8, False),
    ],
)
def test_a_backward_pass_finds_the_weights_of_its_forward_pass(group, p, s, m, stash, rng):
    every = int(rng.integers(3, 6)) if stash else 1
    name, options = "pipedream", dict[str, Any]()
    if group == "double_buffered":
        name, options = "pipedream_2bw", {"update_every": every}
    events = [(a.sign, a.micro_batch) for a in programs(name, p, m, **options)[s]]
    weights = rng.standard_normal((2, 3)), rng.standard_normal(3)
    drawn = rng.standard_normal((m, 2, 3)), 0.1 * (1 + rng.random())
    given = group, p, every, events, weights, *drawn, stash, 2
    few = m < 9 and stash  # too few minibatches for all buffers that the formula counts
    check(versions(*given), versions.package(*given), free=(MOST,) if few else ())
