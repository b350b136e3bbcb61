"""`validate` against an oracle that says the same in another way, on programs changed by chance."""

import re
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from minidist.pipeline_parallel import (
    add_communication,
    add_reductions,
    grid,
    programs,
    validate,
)
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
)
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


def assert_verdict_is_right(made, p, m):
    got, want = verdict(made, p, m), is_valid(made, m)
    assert (got is None) == want, f"{got or 'accepted'}\n{grid(made)}"
    event(f"{type(made).__name__} that is {'valid' if want else 'not valid'}")


def changed(made, random):
    """Return a copy in which one thing has changed: what, is drawn."""
    made = Programs(made, made.placement)
    rank = random.choice([r for r, program in enumerate(made) if program])
    program = made[rank]
    at, to = random.randrange(len(program)), random.randrange(len(program))
    a = program[at]
    match random.choice(
        ["double", "drop", "move", "swap", "give", "number", "chunk", "kind", "peer"]
    ):
        case "double":
            program.insert(to, a)
        case "drop":
            del program[at]
        case "move":
            program.insert(to, program.pop(at))
        case "swap":
            program[at], program[to] = program[to], program[at]
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


@settings(max_examples=100)
@given(made=ANY)
def test_any_order_that_can_be_executed_is_valid(made):
    validate(*made)
    assert is_valid(made[0], made[2])


@pytest.mark.parametrize("changes", [1, 2])
@settings(max_examples=250)
@given(
    drawn=ANY,
    random=st.randoms(use_true_random=False),
)
def test_a_program_that_chance_changed_gets_the_verdict_of_the_oracle(changes, drawn, random):
    made, p, m = drawn
    for _ in range(changes):
        if any(made):
            made = changed(made, random)
    assert_verdict_is_right(made, p, m)


@settings(max_examples=100)
@given(drawn=ANY, random=st.randoms(use_true_random=False))
def test_a_program_that_is_shuffled_gets_the_verdict_of_the_oracle(drawn, random):
    made, p, m = drawn
    made = Programs(made, made.placement)
    for _ in range(random.randint(1, 4)):  # neighbours change places: often it stays valid
        program = random.choice(made)
        at = random.randrange(len(program))
        program[at : at + 2] = reversed(program[at : at + 2])
    assert_verdict_is_right(made, p, m)


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


def test_the_number_of_programs_is_checked():
    with pytest.raises(ValueError, match="there are 2 programs for 3 ranks"):
        validate(one_f_one_b(), 3, 2)
    with pytest.raises(ValueError, match="the placement is for 1 ranks, not 2"):
        validate(Programs(one_f_one_b(), [[0]]), 2, 2)
    with pytest.raises(ValueError, match="no rank holds stage 1; a placement has every stage"):
        validate(Programs(one_f_one_b(), [[0], [2]]), 2, 2)
    with pytest.raises(ValueError, match="there is no program for any rank"):
        validate([], 0, 2)


def test_transfers_cannot_be_added_where_a_stage_leaves_a_micro_batch_out():
    with pytest.raises(ValueError, match="rank 0, F1: no rank does F1 of stage 1"):
        add_communication(with_change(1, lambda x: x.remove(Forward(1))))


def test_plain_lists_are_programs_whose_stages_go_round():
    validate([list(program) for program in programs("interleaved", 2, 4, chunks=2)], 2, 4)
    with pytest.raises(ValueError, match="have their transfers already"):
        add_communication(one_f_one_b(full=True))


def test_a_micro_batch_that_no_rank_takes_or_two_replicas_take_is_found():
    made = programs("pipedream", 2, 4, replicas=[2])
    made[0] = [a for a in made[0] if a.micro_batch != 2]
    with pytest.raises(ValueError, match="micro-batch 2 goes 0 times, not once, through stage 0"):
        validate(made, 2, 4)
    made = programs("pipedream", 2, 4, replicas=[2])
    made[1][:0] = [Forward(0), Backward(0)]
    with pytest.raises(ValueError, match="micro-batch 0 goes 2 times, not once, through stage 0"):
        validate(made, 2, 4)


def test_replicas_that_do_not_update_together_are_found():
    made = programs("pipedream", 2, 4, replicas=[2])
    made[1].remove(Update(1))
    message = r"rank 1, action 5: stage 0 updates at \[3\] here, and at \[1, 3\] on rank 0"
    with pytest.raises(ValueError, match=message):
        validate(made, 2, 4)
    made = programs("pipedream", 3, 4, replicas=[2, 1])  # rank 2's F3 waits for what rank 1 never
    made[1].remove(Update(1))  # comes to, since rank 0 takes no update without it
    made[1].append(Update(1))
    with pytest.raises(ValueError, match=r"comes before|deadlock"):
        validate(made, 3, 4)


def test_a_long_program_is_shown_where_the_fault_is():
    made = programs("1f1b", 24, 100)
    del made[20][90]
    with pytest.raises(ValueError) as caught:
        validate(made, 24, 100)
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) <= 17 and max(map(len, lines)) <= 120
    assert any(line.startswith("rank 20") and " ... " in line for line in lines)


def test_the_grid_shows_a_line_per_rank():
    assert grid(programs("1f1b", 2, 2)) == "rank 0   F0 F1 B0 B1\nrank 1   F0 B0 F1 B1"
    assert grid([]) == ""
