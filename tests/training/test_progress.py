"""What a run shows of its steps: the lines, and the log that the losses and bytes are read from."""

import csv
from dataclasses import replace

import numpy as np
import pytest

from minidist.checkpoint import Keep
from minidist.comm import run
from minidist.comm.communicator import Ledger
from minidist.nn.datasets import Text
from minidist.training.loop import train, warm_up_and_decay
from minidist.training.settings import Settings
from minidist.training.setup import HEAD, Progress, rows_of

TEXT = Text(np.random.default_rng(0).integers(0, 5, 400), "abcde", "five characters")
SMALL = Settings(steps=6, batch=6, context=8, width=12, dropout=0.2, micro_batches=2)


def table(path):
    with open(path, encoding="utf-8") as file:
        return list(csv.DictReader(file))


def column(path, name):
    return [float(row[name]) for row in table(path)]


MESHES = [{}, {"pp": 2}, {"tp": 2, "zero": 1}, {"dp": 2, "precision": "float16"}]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_log_has_the_loss_the_rate_and_what_rank_0_has_sent(tmp_path, mesh):
    """The bytes are counted where they are sent: those of all groups of rank 0, once each."""
    log, settings = tmp_path / "log.csv", replace(SMALL, **mesh)

    def worker(group):
        ledgers, original = [group.ledger], Ledger.__init__

        def made(self):
            original(self)
            ledgers.append(self)

        def total(*_):
            moments.append(sum(ledger.total for ledger in ledgers))

        moments = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ledger, "__init__", made)
            patch.setattr(Progress, "__enter__", lambda self: (total(), self)[1])
            patch.setattr(Progress, "__exit__", total)
            losses, _ = train(group, TEXT, settings, None, log)
        return losses, moments[1] - moments[0]

    losses, sent = run(worker, settings.ranks)[0]
    np.testing.assert_allclose(column(log, "loss"), losses, rtol=1e-8)
    rates = [settings.lr * warm_up_and_decay(step, 6) for step in range(6)]
    np.testing.assert_allclose(column(log, "lr"), rates, rtol=1e-8)
    assert column(log, "step") == [1, 2, 3, 4, 5, 6] and min(column(log, "seconds")) > 0
    assert {row["rank"] for row in table(log)} == {"0"}
    assert sum(column(log, "bytes_sent")) == sent and (sent > 0) == (settings.ranks > 1)


@pytest.mark.parametrize("at, grown", [(2, False), (4, True)])
def test_a_run_that_goes_on_writes_no_step_twice_and_leaves_none_out(tmp_path, at, grown):
    log, keep = tmp_path / "log.csv", Keep(str(tmp_path / "run"), every=2)
    run(train, 2, TEXT, replace(SMALL, dp=2, steps=4), keep, log, transport="thread")
    before = column(log, "loss")
    keep = replace(keep, resume=True, step=at)
    more = replace(SMALL, dp=2, depth=3 if grown else 2)
    run(train, 2, TEXT, more, keep, log, transport="thread")
    assert column(log, "step") == list(range(1, 11 if grown else 7))
    assert column(log, "loss")[:at] == before[:at]


def test_a_run_that_begins_begins_its_log(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text(f"{HEAD}\n9,1,1,1,1,0\n")
    run(train, 1, TEXT, SMALL, None, log, transport="thread")
    assert column(log, "step") == [1, 2, 3, 4, 5, 6] and not list(tmp_path.glob("*.new"))


def shown_by(capsys, steps, first=0):
    """Return the lines that two ranks print."""

    def worker(group):
        with Progress(group, [group], steps, first=first) as progress:
            for step in range(first, steps):
                progress.done(step, 2.0, 0.5)

    run(worker, 2, transport="thread")
    return capsys.readouterr().err.splitlines()


def test_where_there_is_no_terminal_rank_0_prints_a_line_every_tenth(capsys):
    for steps, lines in [(1, 1), (3, 3), (25, 10), (1000, 10)]:
        shown = shown_by(capsys, steps)
        assert len(shown) == lines
        assert shown[-1].startswith(f"step {steps} of {steps}: loss 2.000, ")
    counts = [line.split(":")[0] for line in shown_by(capsys, 20, first=15)]
    assert counts == ["step 16 of 20", "step 18 of 20", "step 20 of 20"]


def test_what_is_no_log_is_refused_and_a_row_that_was_cut_short_is_left_out(tmp_path):
    path = tmp_path / "log"
    for content in ("a,b\n1,2\n", "# notes\n", f"{HEAD},more\n"):
        path.write_text(content)
        with pytest.raises(ValueError, match="is not a log of `minidist train`; use another file"):
            rows_of(path)
    for name in ("", "no/log.csv"):
        with pytest.raises(ValueError, match="cannot write the log"):
            rows_of(tmp_path / name)
    path.write_text(f"{HEAD}\n1,2,0.1,0.5,0,0\n2,1.")
    assert rows_of(path) == ["1,2,0.1,0.5,0,0"]
    path.write_text("")
    assert rows_of(path) == rows_of(tmp_path / "none") == []
