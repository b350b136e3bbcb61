"""`validate` against an oracle that says the same in another way, on programs changed by chance."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from minidist.pipeline_parallel import add_communication, add_reductions, grid, programs, validate
from minidist.pipeline_parallel.actions import (
    RECEIVES,
    SENDS,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Programs,
    RecvActivation,
    Reduce,
    Transfer,
    Update,
    updates,
)
from minidist.pipeline_parallel.text import read
from minidist.pipeline_parallel.validation import certificate
from tests.pipeline_parallel.oracles import is_valid
from tests.strategies import (
    linear_extensions,
    schedules,
    with_or_without_communication,
    with_or_without_reductions,
)

COMPUTE = [Forward, Backward, BackwardInput, BackwardWeight, Update]
ANY = with_or_without_communication(with_or_without_reductions(schedules() | linear_extensions()))


def verdict(made, p, m):
    """Return None, or what validate says; check that it points at something."""
    try:
        return validate(made, p, m)
    except ValueError as error:
        text = str(error)
        rank, at = map(int, re.match(r"rank (\d+), action (\d+): ", text).groups())
        assert 0 <= rank < p and 0 <= at <= len(made[rank])
        marked = [line for line in text.splitlines() if re.fullmatch(r" *\^+", line)]
        assert len(marked) == 1 and f"\nrank {rank} " in text
        return text


def changed(made, random):
    """Return a copy in which one thing has changed: what, is drawn."""
    made = Programs(made, made.placement)
    rank = random.choice([r for r, program in enumerate(made) if program])
    program = made[rank]
    at, to = random.randrange(len(program)), random.randrange(len(program))
    a = program[at]
    kinds = "double drop move swap neighbours neighbours give number chunk kind peer".split()
    match random.choice(kinds):
        case "double":
            program.insert(to, a)
        case "drop":
            del program[at]
        case "move":
            program.insert(to, program.pop(at))
        case "swap":
            program[at], program[to] = program[to], program[at]
        case "neighbours":  # often the program stays valid
            program[at : at + 2] = reversed(program[at : at + 2])
        case "give":
            other = random.choice(made)
            other.insert(random.randint(0, len(other)), program.pop(at))
        case "number" if not isinstance(a, Reduce):
            program[at] = replace(a, micro_batch=a.micro_batch + random.choice([-1, 1, 2]))
        case "chunk":
            program[at] = replace(a, chunk=a.chunk + random.choice([-1, 1]))
        case "kind" if isinstance(a, Transfer):
            kind = random.choice([*SENDS, *RECEIVES])
            program[at] = kind(a.micro_batch, a.chunk, a.peer, a.peer_chunk)
        case "kind":
            kind = random.choice([*COMPUTE, Reduce])
            program[at] = Reduce(a.chunk) if kind is Reduce else kind(a.micro_batch, a.chunk)
        case "peer" if isinstance(a, Transfer):
            program[at] = random.choice(
                [replace(a, peer=(a.peer + 1) % len(made)), replace(a, peer_chunk=a.peer_chunk + 1)]
            )
    return made


@settings(max_examples=250)
@given(drawn=ANY, changes=st.integers(0, 3), random=st.randoms(use_true_random=False))
def test_a_program_that_chance_changed_gets_the_verdict_of_the_oracle(drawn, changes, random):
    made, p, m = drawn
    for _ in range(changes):
        if any(made):
            made = changed(made, random)
    got, want = verdict(made, p, m), is_valid(made, m)
    assert (got is None) == want, f"{got or 'accepted'}\n{grid(made)}"
    assert want or changes
    event(f"{type(made).__name__} that is {'valid' if want else 'not valid'}")


def one_f_one_b(full=False):
    made = programs("1f1b", 2, 2)
    return add_communication(made) if full else made


def with_change(rank, change, full=False):
    made = one_f_one_b(full)
    change(made[rank])
    return made


def with_sums(change, chunks=2):
    """Return the actions of two ranks with an R per chunk, of which rank 1's are changed."""
    made = add_reductions(programs("interleaved", 2, 2, chunks))
    change(made[1])
    return made


@pytest.mark.parametrize(
    "made, message",
    [
        (with_change(0, lambda x: x.append(Backward(1))), "rank 0, action 4: B1 comes twice"),
        (with_change(1, lambda x: x.pop()), "rank 1, action 2: F1 is the last .* missing: B, or I"),
        (with_change(0, lambda x: x.reverse()), "action 0: B1 must come after F .* which has"),
        (with_change(1, lambda x: x.insert(1, Forward(2))), "F2 is foreign: there are 2 micro-"),
        (with_change(1, lambda x: x.extend([Forward(-1), Backward(-1)])), "action 4: F-1 is forei"),
        (with_change(0, lambda x: x.extend([Forward(0, -1), Backward(0, -1)])), "F0.-1 is foreign"),
        (with_change(1, lambda x: x.insert(1, Forward(0, 1))), "F0.1 is foreign: .* chunks 0 to 0"),
        (with_change(0, lambda x: x.insert(1, "F2")), "'F2' is no action"),
        (with_change(0, lambda x: x.insert(3, Update(1))), "U1 comes before B1, which it applies"),
        (with_change(0, lambda x: x.append(Update(1))), "rank 1, action 4: no update of stage 1"),
        (with_change(0, lambda x: x.remove(x[1]), True), "F0 needs >F0 after it"),
        (with_change(1, lambda x: x.remove(x[0]), True), "F0 needs <F0 before it"),
        (with_change(0, lambda x: x.append(x[1]), True), ">F0 comes twice"),
        (
            with_change(1, lambda x: x.append(RecvActivation(1, peer=1)), True),
            "<F1 with rank 1 is not due",
        ),
        (with_sums(lambda x: x.append(Reduce(1))), "action 10: R.1 comes twice"),
        (with_sums(lambda x: x.remove(Reduce(1))), "action 9: R.1 is missing; the gradients of"),
        (with_sums(lambda x: x.append(Reduce(2))), "R.2 is foreign: here are chunks 0 to 1"),
        (
            with_sums(lambda x: x.insert(5, x.pop(6))),
            "rank 1, action 5: R.1 comes before B1.1, whose gradient it sums",
        ),
        (with_sums(lambda x: x.append(Update(1)), 1), "U1 sums its gradients itself, so no R may"),
        (
            Programs(
                [
                    [Forward(0), Backward(0), Forward(1), Backward(1)],
                    [Forward(1), Forward(0), Backward(0), Backward(1)],
                ]
            ),
            "deadlock: .* rank 0 before B0, rank 1 before F1",
        ),
    ],
)
def test_the_message_names_the_fault_and_marks_it(made, message):
    with pytest.raises(ValueError, match=message) as caught:
        validate(made, 2, 2)
    first, *lines = str(caught.value).splitlines()
    rank, at = map(int, re.match(r"rank (\d), action (\d+)", first).groups())
    (mark,) = [i for i, line in enumerate(lines) if set(line) == {" ", "^"}]
    assert lines[mark - 1].startswith(f"rank {rank}")
    below = lines[mark - 1][lines[mark].index("^") :].split()
    assert below[:1] == ([str(made[rank][at])] if at < len(made[rank]) else [])


def paired(forward, backward, order="F0 F1 B0 B1", rank=0):
    """Return 1F1B on two ranks, rank 0 in another order, with a pair on one rank."""
    kinds = {"F": Forward, "B": Backward}
    made = programs("1f1b", 2, 2)
    made[0] = [kinds[word[0]](int(word[1])) for word in order.split()]
    return Programs(made, made.placement, [(rank, forward, backward)])


def test_a_pair_is_a_forward_and_the_backward_next_to_it_which_can_begin_together():
    made = programs("1f1b", 3, 4)
    pairs = {(0, Forward(3), Backward(1)), (1, Forward(2), Backward(1))}
    made = Programs(made, made.placement, pairs)
    for full in (made, add_communication(made), add_communication(made, rendezvous_safe=True)):
        assert full.pairs == pairs
        validate(full, 3, 4)


@pytest.mark.parametrize(
    "made, message",
    [
        (paired(Forward(0), Backward(0)), "0, action 0: F0 and B0 are a pair, but B0 is not next"),
        (paired(Forward(2), Backward(0)), "action 4: F2 and B0 are a pair, but B0 is not next"),
        (paired(Backward(0), Forward(1), "F0 B0 F1 B1"), "B0 and F1 .* not a forward and then"),
        (paired(Forward(1), BackwardWeight(0)), "F1 and W0 .* not a forward and then a backward"),
        (paired(Forward(0), Backward(0), "F0 B0 F1 B1"), "rank 1 before F0, if pairs overlap"),
        (paired(Forward(0), Backward(0), rank=2), "F0 and B0 are a pair on rank 2, which is none"),
    ],
)
def test_a_pair_that_cannot_be_is_refused(made, message):
    for programs_ in (made, add_communication(made)):
        try:
            validate(programs_, 2, 2)
        except ValueError as error:
            assert re.search(message, str(error))
        else:
            pytest.fail(f"a pair that cannot overlap was accepted: not {message}")


def test_a_long_program_is_shown_where_the_fault_is():
    made = programs("1f1b", 24, 100)
    del made[20][90]
    with pytest.raises(ValueError) as caught:
        validate(made, 24, 100)
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) <= 17 and max(map(len, lines)) <= 120
    assert any(line.startswith("rank 20") and " ... " in line for line in lines)


@given(case=with_or_without_reductions(linear_extensions() | schedules()))
def test_every_valid_order_is_certified(case):
    made, _, m = case
    found = certificate(made, m)
    assert found["ok"], found["words"]
    whole = Counter(found["rows"][0]["micro_batches"])
    assert set(whole) <= set(range(m))


def test_replicas_of_a_stage_have_its_micro_batches_together():
    found = certificate(programs("pipedream", 3, 4, replicas=[2, 1]), 4)
    assert found["ok"] and [row["micro_batches"] for row in found["rows"]] == [
        [0, 2],
        [1, 3],
        [0, 1, 2, 3],
    ]


NOT_WHOLE = {  # none of them valid; all can be executed
    "a micro-batch goes twice": ("rank 0 F0 F0 B0 B0\nrank 1 F0 B0", "stage 0 ends with [0, 0]"),
    "a backward is counted twice": ("rank 0 F0 B0 W0\nrank 1 F0 B0", "stage 0 ends with [0, 0]"),
    "a weight half is missing": ("rank 0 F0 B0\nrank 1 F0 I0", "stage 1 ends with []"),
    "a backward is missing": ("rank 0 F0\nrank 1 F0 B0", "stage 0 ends with []"),
    "a micro-batch is missing": ("rank 0 F0 F1 B1\nrank 1 F0 F1 B1 B0", "stage 0 ends with [1]"),
    "an update is missing": ("rank 0 F0 B0 U0 F1 B1", "stage 0 ends with [0]"),
    "a sum is too early": ("rank 0 F0 B0 F1 R B1", "stage 0 ends with [0]"),
}


@pytest.mark.parametrize("what", NOT_WHOLE)
def test_programs_whose_gradient_is_not_whole_are_not_certified(what):
    text, words = NOT_WHOLE[what]
    made = read(text)
    found = certificate(made, 2 if "F1" in text else 1)
    assert not found["ok"] and found["words"].startswith(words)


@given(case=schedules() | linear_extensions(), random=st.randoms(use_true_random=False))
def test_without_any_one_of_its_weight_gradients_a_program_is_not_certified(case, random):
    made, _, m = case
    places = [
        (r, i)
        for r, program in enumerate(made)
        for i, action in enumerate(program)
        if isinstance(action, BackwardWeight)
    ]
    assume(places and not updates(made))
    rank, at = random.choice(places)
    less = [[a for i, a in enumerate(own) if (r, i) != (rank, at)] for r, own in enumerate(made)]
    assert not certificate(Programs(less, made.placement), m)["ok"]
