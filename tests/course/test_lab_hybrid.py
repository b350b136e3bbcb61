"""The hybrid lab: what it gives to the reference, to the starter, and to wrong sums."""

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

MESH, HYBRID, OPTIM = "comm/mesh.py", "hybrid.py", "optim.py"
STAGE, PIPELINE = "pipeline_parallel/stage.py", "pipeline_parallel/pipeline.py"
SHARD, COLUMNS = "nn/shard.py", "tensor_parallel/column_parallel.py"

NEEDS = {"6.2": ("6.1",), "6.5": ("6.1", "6.2", "6.3", "6.4")}

MISTAKES = [  # task, file, right, wrong, what the grader says
    (
        "6.1",
        MESH,
        "in reversed(self.axes.items())",
        "in self.axes.items()",
        "last axis is the fast",
    ),
    (
        "6.1",
        MESH,
        "coordinates.get(name, self.coordinates[name])",
        "coordinates.get(name, 0)",
        "of which one axis is named",
    ),
    ("6.1", MESH, "if not 0 <= c < size:", "if not c < size:", "=-1: a ValueError is due"),
    (
        "6.1",
        MESH,
        "return {name: coordinates[name] for name in self.axes}",
        "return coordinates",
        "order of the axes",
    ),
    ("6.2", MESH, "color * axes[other] + self", "color + self", "the ranks of"),
    (
        "6.2",
        MESH,
        "key=self.coordinates[name])",
        "key=-self.coordinates[name])",
        "in another order",
    ),
    ("6.2", MESH, "or math.prod(axes.values()) != group.size", "", "a ValueError is due"),
    ("6.2", MESH, "if n != name]", "]", "the ranks of"),
    (
        "6.3",
        PIPELINE,
        "                p.grad = None\n        return taken",
        "        return taken",
        "may have been summed again by the second",
    ),
    (
        "6.3",
        PIPELINE,
        "            sum_gradients([p], self.shared[name])\n",
        "",
        "0 bytes are sent for the tied",
    ),
    (
        "6.3",
        PIPELINE,
        "p.grad if earlier is None else earlier + p.grad",
        "p.grad",
        "embedding.token.weight",
    ),
    ("6.3", STAGE, "found[name].append(stage)", "found[name] = [stage]", "is held by the stages"),
    (
        "6.4",
        HYBRID,
        'self.mesh.dp.all_reduce(layer.flat.gradient, out=layer.flat.gradient, label="dp")',
        "pass",
        "has not been summed over any rank",
    ),
    (
        "6.4",
        HYBRID,
        "p.grad = p.grad_buffer",
        "p.grad = p.grad_buffer / self.mesh.dp.size",
        "an average over dp",
    ),
    (
        "6.4",
        HYBRID,
        "if self.split_sequence:\n            all_reduce",
        "if True:\n            all_reduce",
        "tp adds it up",
    ),
    (
        "6.4",
        HYBRID,
        "if self.split_sequence:\n            all_reduce",
        "if False:\n            all_reduce",
        "0 bytes are sent on tp",
    ),
    (
        "6.5",
        HYBRID,
        "examples[mine], targets.size",
        "examples[mine], targets[mine].size",
        "total of 0 on rank",
    ),
    ("6.5", HYBRID, "examples[mine], targets.size", "None, targets.size", "examples of"),
    (
        "6.5",
        HYBRID,
        "self.mesh.dp.all_reduce(self.mesh.pp.all_reduce(np.array(loss)))",
        "self.mesh.dp.all_reduce(np.array(loss))",
        "loss on rank 0",
    ),
    (
        "6.5",
        HYBRID,
        "if any(p.grad is not None for p in self.parameters()):",
        "if False:",
        "a ValueError",
    ),
    ("6.6", HYBRID, "not again and not repeated", "not again", "of tp has alike counts on each"),
    (
        "6.6",
        HYBRID,
        "not again and not repeated",
        "not repeated",
        "a tied parameter counts once per stage",
    ),
    (
        "6.6",
        HYBRID,
        "self.mesh.pp.all_reduce(self.mesh.tp.all_reduce(np.array(total)))",
        "self.mesh.dp.all_reduce(self.mesh.pp.all_reduce(self.mesh.tp.all_reduce(np.array(total))))",
        "replicas on dp are added up",
    ),
    ("6.6", OPTIM, "if norm > max_norm:", "if True:", "are not made longer"),
    (
        "6.6",
        OPTIM,
        "if sum_squares is None and any(",
        "if False and any(",
        "are to be a ValueError",
    ),
    (
        "6.7",
        SHARD,
        'np.argsort(indices, kind="stable")[: self.full]',
        "np.arange(self.full)",
        "in other places",
    ),
    ("6.7", SHARD, "[: self.full]", "", "has the shape"),
    ("6.7", PIPELINE, "    return result", "    return mine", "is missing"),
    ("6.7", PIPELINE, "int(ranks.argmax())", "0", ""),
]

OTHERS = [  # task, file, the reference's way, another right one
    (
        "6.2",
        MESH,
        "color = color * axes[other] + self.coordinates[other]",
        "color = 10 * color + self.coordinates[other]",
    ),
    (
        "6.4",
        HYBRID,
        (
            'self.mesh.dp.all_reduce(layer.flat.gradient, out=layer.flat.gradient, label="dp")',
            "p.grad = p.grad_buffer",
        ),
        ("pass", "p.grad = self.mesh.dp.all_reduce(p.grad_buffer)"),
    ),
    ("6.6", HYBRID, "self.mesh.tp.rank > 0", "self.mesh.tp.rank < self.mesh.tp.size - 1"),
    ("6.7", PIPELINE, "int(ranks.argmax())", "int(np.flatnonzero(ranks)[-1])"),
]


def test_the_handout_has_numbers_hints_and_names_that_exist():
    check_handout("hybrid")


def test_zeros_and_the_answers_to_other_questions_are_wrong():
    check_answers("hybrid")


def test_the_reference_gets_all_points(tmp_path):
    check_reference(tmp_path, "hybrid")


def test_the_starter_gets_none_and_every_task_says_what_is_to_be_written(tmp_path):
    check_starter(tmp_path, "hybrid")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_the_reference_gets_all_points_for_any_seed(tmp_path, seed):
    check_reference(tmp_path, "hybrid", seed)


@pytest.mark.slow
@pytest.mark.parametrize("id", [f"6.{n}" for n in range(1, 8)])
def test_whoever_has_done_one_task_and_what_it_builds_on_gets_their_points(tmp_path, id):
    check_alone(tmp_path, "hybrid", id, NEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("body", TRIVIAL.values(), ids=TRIVIAL)
def test_trivial_bodies_earn_nothing(tmp_path, body):
    check_trivial(tmp_path, "hybrid", body)


@pytest.mark.slow
@pytest.mark.parametrize("id, path, right, other", OTHERS)
def test_another_right_way_earns_the_points(tmp_path, id, path, right, other):
    check_other(tmp_path, "hybrid", id, path, right, other)


@pytest.mark.parametrize(
    "id, path, right, wrong, said",
    [
        pytest.param(*mistake, marks=[pytest.mark.slow] if at else [], id=f"{mistake[0]}-{at}")
        for at, mistake in enumerate(MISTAKES)
    ],
)
def test_a_wrong_sum_earns_nothing_and_is_told_why(tmp_path, id, path, right, wrong, said):
    check_mistake(tmp_path, "hybrid", id, path, right, wrong, said)
