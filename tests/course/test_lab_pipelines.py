"""The pipelines lab: what it gives to the reference, to the starter, and to wrong programs."""

import pytest

from tests.course.students import (
    TRIVIAL,
    check_alone,
    check_answers,
    check_handout,
    check_mistake,
    check_other,
    check_reference,
    check_starter,
    check_trivial,
)

GPIPE, ONE = "pipeline_parallel/gpipe.py", "pipeline_parallel/one_f_one_b.py"
TRANSFERS, EXECUTOR = "pipeline_parallel/communication.py", "pipeline_parallel/executor.py"
INTERLEAVED, ZERO = "pipeline_parallel/interleaved.py", "pipeline_parallel/zero_bubble.py"
VERSIONS = "pipeline_parallel/weight_versions.py"

MISTAKES = [  # task, file, right, wrong, what the grader says
    (
        "4.1",
        GPIPE,
        "from map(Forward, range(m))\n    yield from map(Backward, reversed(range(m)))",
        "from (kind(i) for i in range(m) for kind in (Forward, Backward))",
        "only one rank works at any time, as in layer_split",
    ),
    ("4.1", GPIPE, "Backward, reversed(range(m))", "Backward, range(m - 1)", "missing: B, or I"),
    (
        "4.1",
        GPIPE,
        "yield from map(Forward, range(m))\n    yield from map(Backward, reversed(range(m)))",
        "from minidist.pipeline_parallel.one_f_one_b import one_f_one_b\n\n"
        "    yield from one_f_one_b(rank, p, m)",
        " at its peak, not ",
    ),
    ("4.1", GPIPE, "reversed(range(m))", "range(m) if rank else reversed(range(m))", " idles "),
    ("4.2", ONE, "min(p - 1 - rank, m)", "min(p - rank, m)", "one forward too early"),
    ("4.2", ONE, "min(p - 1 - rank, m)", "m", " = min(m, p - r): all of them"),
    ("4.2", ONE, "min(p - 1 - rank, m)", "p - 1 - rank", "is foreign"),
    ("4.2", ONE, "min(p - 1 - rank, m)", "0", "only one rank works at any time"),
    ("4.3", TRANSFERS, "*holder[stage, m]", "(rank + stage - k) % len(programs), c", "needs"),
    ("4.3", TRANSFERS, "if rendezvous_safe else _one_by_one", "if False else _one_by_one", ""),
    (
        "4.3",
        TRANSFERS,
        "if rendezvous_safe:\n                    result[send.peer]",
        "if True:\n                    result[send.peer]",
        "comes twice",
    ),
    ("4.3", TRANSFERS, "if passes_backward(action)", "if k > 0 and passes_backward(action)", "<B"),
    ("4.3", TRANSFERS, "if communicates(programs):", "if False:", "not to be added again"),
    (
        "4.4",
        EXECUTOR,
        "chunk = transfer.chunk if receives else transfer.peer_chunk",
        "chunk = transfer.chunk",
        "are two ends of one transfer",
    ),
    ("4.4", EXECUTOR, "(chunk << 1) + gradient", "(chunk << 1)", "have one tag"),
    ("4.4", EXECUTOR, "(transfer.micro_batch << 16) +", "", "have one tag"),
    (
        "4.4",
        EXECUTOR,
        "[a.micro_batch for a in run]",
        "[i]",
        "layers.",
    ),
    ("4.4", EXECUTOR, "stage.update(i)", "pass", "has updated with micro-batches []"),
    (
        "4.4",
        EXECUTOR,
        "group.send(stage.output(i), peer, tag(action))",
        "[group.send(y, peer, tag(action)) for y in [stage.output(i)] for _ in range(1 + (i > 0))]",
        "nobody",
    ),
    ("4.5", INTERLEAVED, "2 * (p - 1 - rank)", "2 * rank", "deadlock"),
    ("4.5", INTERLEAVED, "min(total, 2 * (p - 1 - rank) + (chunks - 1) * p)", "total", "not"),
    ("4.5", INTERLEAVED, "chunks - 1 - chunk", "chunk", "deadlock"),
    ("4.5", INTERLEAVED, "if m % p:", "if False:", "a ValueError is due"),
    ("4.6", ZERO, "late=rank)", "late=0)", "all W come right after their I"),
    ("4.6", ZERO, "ahead=p - rank, late=rank)", "ahead=p, late=rank)", " idles "),
    (
        "4.6",
        ZERO,
        "ahead=2 * (p - rank) - 1, late=2 * rank",
        "ahead=p - rank, late=rank",
        " idles ",
    ),
    ("4.6", ZERO, "range(max(0, m - late), m)", "range(m - late, m)", "foreign"),
    ("4.7", VERSIONS, "max(0, b - (p - 1))", "b - (p - 1)", "the newest version 0, p = "),
    ("4.7", VERSIONS, "max(0, b // every - 1)", "b // every", "version 1, not 0"),
    (
        "4.7",
        VERSIONS,
        'self._use("B", b, self.in_flight.pop(b))',
        'self._use("B", b, self.newest)\n        self.in_flight.pop(b)',
        "in B1 the weights are version 1, not version 0: backward needs what",
    ),
    (
        "4.7",
        VERSIONS,
        "self.newest = self.newest.copy()",
        "pass",
        "an update has to leave them alone",
    ),
    ("4.7", VERSIONS, "n >= version}", "n >= 0}", "buffers were kept at once, not"),
    (
        "4.7",
        VERSIONS,
        "self.first + self.choose(b, self.version - self.first)",
        "self.choose(b, self.version)",
        "",
    ),
]

OTHERS = [  # task, file, the reference's way, another right one
    ("4.1", GPIPE, "Backward, reversed(range(m))", "Backward, range(m)"),
    (
        "4.2",
        ONE,
        "yield from map(Forward, range(ahead))",
        "yield from [Forward(i) for i in range(ahead)]",
    ),
    (
        "4.4",
        EXECUTOR,
        "(transfer.micro_batch << 16) + (chunk << 1) + gradient",
        "transfer.micro_batch + 1000 * chunk + 1_000_000 * gradient",
    ),
    ("4.5", INTERLEAVED, "2 * (p - 1 - rank)", "(p - 1 - rank)"),
    ("4.7", VERSIONS, "self.newest = self.newest.copy()", "self.newest = self.newest + 0"),
]


def test_the_handout_has_numbers_hints_and_names_that_exist():
    check_handout("pipelines")


def test_zeros_and_the_answers_to_other_questions_are_wrong():
    check_answers("pipelines")


def test_the_reference_gets_all_points(tmp_path):
    check_reference(tmp_path, "pipelines")


def test_the_starter_gets_none_and_every_question_says_what_is_to_be_written(tmp_path):
    check_starter(tmp_path, "pipelines")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_the_reference_gets_all_points_for_any_seed(tmp_path, seed):
    check_reference(tmp_path, "pipelines", seed)


@pytest.mark.slow
@pytest.mark.parametrize("id", [f"4.{n}" for n in range(1, 8)])
def test_whoever_has_done_one_task_gets_its_points_and_no_others(tmp_path, id):
    check_alone(tmp_path, "pipelines", id, {})


@pytest.mark.slow
@pytest.mark.parametrize("body", TRIVIAL.values(), ids=TRIVIAL)
def test_trivial_bodies_earn_nothing(tmp_path, body):
    check_trivial(tmp_path, "pipelines", body)


@pytest.mark.slow
@pytest.mark.parametrize("id, path, right, other", OTHERS)
def test_another_right_way_earns_the_points(tmp_path, id, path, right, other):
    check_other(tmp_path, "pipelines", id, path, right, other)


@pytest.mark.parametrize(
    "id, path, right, wrong, said",
    [
        pytest.param(*mistake, marks=[pytest.mark.slow] if at else [], id=f"{mistake[0]}-{at}")
        for at, mistake in enumerate(MISTAKES)
    ],
)
def test_a_wrong_program_earns_nothing_and_is_told_why(tmp_path, id, path, right, wrong, said):
    check_mistake(tmp_path, "pipelines", id, path, right, wrong, said)
