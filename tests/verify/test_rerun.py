"""Wrong gradients that no sum explains are those of a mistake of the register, run on this case."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from minidist import nn
from minidist.data_parallel.replicated import DataParallel
from minidist.verify import equivalence
from minidist.verify.causes import rerun
from minidist.verify.mistakes.overlay import BUILT_FROM, build
from minidist.verify.mistakes.register import find
from minidist.verify.outcomes import of_job
from minidist.verify.strategies import STRATEGIES, Case, one_device
from minidist.verify.strategies.job import AtWork
from tests.strategies import arrays

MLP = nn.MLP([4, 6, 3], "gelu", dtype="float64")
CASE = Case("MLP", MLP, arrays(5, 4), np.arange(5) % 3)


def own_sums_of_a_gradient(group, sums):
    return group.all_reduce(sums) if sums.ndim == 1 else sums


def test_another_program_with_a_known_mistake_has_its_numbers(cluster, monkeypatch):
    def another_program(model, group):
        trainer = DataParallel(model, group)
        for norm in model.modules(nn.BatchNorm):
            norm.sum_over_ranks = partial(own_sums_of_a_gradient, group)
        return trainer

    sound = STRATEGIES["sync_batch_norm"]
    worker = partial(of_job, partial(AtWork, make=another_program))
    monkeypatch.setitem(STRATEGIES, sound.name, replace(sound, worker=worker))
    case = replace(sound.cases(3)[0], loss=lambda *given, **more: nn.cross_entropy(*given, **more))
    row = equivalence.check(sound.name, case, 3, cluster(3, "thread"))
    said = "the numbers are those of backward_sums_of_one_rank: "
    assert said in row["detail"], row["detail"]


CHECK = """
from minidist.verify.equivalence import check, find
print(check("column", find("column").cases(2)[0], 2, transport="thread")["detail"])
"""


@pytest.mark.parametrize(
    "built, words",
    [
        (True, "the numbers are those of f_missing: The gradient that"),
        (False, "this package was edited where the register has the mistake "),
    ],
)
def test_a_mistake_of_the_package_itself_is_named(tmp_path, built, words):
    build(tmp_path, find("f_missing").files())
    if not built:  # but edited
        (tmp_path / "minidist" / BUILT_FROM).unlink()
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert words in done.stdout and "f_missing: The" in done.stdout, done.stdout + done.stderr


def test_sound_gradients_others_that_no_mistake_gives_and_a_late_answer_have_no_name(monkeypatch):
    want = one_device(CASE)
    assert rerun.known("column", CASE, [want] * 2) is None
    assert rerun.known("column", CASE, [{n: g + 0.1 for n, g in want.items()}] * 2) is None
    monkeypatch.setattr(rerun, "LIMIT", 0.1)
    assert rerun.known("column", CASE, [want] * 2) is None


def test_verify_runs_the_register_for_the_first_red_row_of_a_strategy_alone(monkeypatch):
    sound = equivalence.worker_of(equivalence.find("naive"))

    def wrong(group, case, **options):
        outcome = sound(group, case)
        return replace(outcome, gradients={n: g + 0.1 for n, g in outcome.gradients.items()})

    asked = []
    monkeypatch.setattr(equivalence, "known", lambda strategy, case, got: asked.append(strategy))
    for name in ("naive", "bucketed"):
        monkeypatch.setitem(STRATEGIES, name, replace(STRATEGIES[name], worker=wrong))
    rows = list(equivalence.verify(["naive", "bucketed"], [1, 2], "thread"))
    assert len(rows) > 8 and not any(row["ok"] for row in rows)
    assert asked == ["naive", "bucketed"]
