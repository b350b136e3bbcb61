"""Programs that were written are read as they were; what is no program is refused with a remedy."""

import csv
import io
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from minidist.pipeline_parallel import programs, read, validate, write
from minidist.pipeline_parallel.actions import (
    Programs,
    Reduce,
    last_stage,
    micro_batches_of,
    updates,
)
from minidist.pipeline_parallel.text import FORMATS, as_text
from minidist.planning import simulate
from minidist.verify import equivalence
from minidist.verify.strategies.pipeline_parallel import cases_of
from tests.pipeline_parallel.oracles import assert_same
from tests.strategies import linear_extensions, schedules

V = """\
placement  0 3 | 1 2
rank 0     F0 F0.1 (F1 B0.1) F1.1 B1.1 B0 B1
rank 1     F0 F0.1 F1 F1.1 B0.1 B1.1 B0 B1
"""
V_OF_TORCH = """\
0F0,3F0,(0F1;3B0)OVERLAP_F_B,3F1,3B1,0B0,0B1\r
1F0,2F0,1F1,2F1,2B0,2B1,1B0,1B1\r
"""


def with_chunks_ascending(made):
    """Return the same order; a rank's chunks are numbered by their stages, as PyTorch's text is."""
    to = [[sorted(own).index(k) for k in own] for own in made.placement]
    new = lambda r, a: type(a)(a.micro_batch, to[r][a.chunk])  # noqa: E731
    return Programs(
        [[new(r, a) for a in program] for r, program in enumerate(made)],
        [sorted(own) for own in made.placement],
        [(r, new(r, f), new(r, b)) for r, f, b in made.pairs],
    )


@given(drawn=schedules() | linear_extensions())
def test_programs_that_were_written_are_read_as_they_were(drawn):
    made, p, m = drawn
    text = as_text(made)
    assert_same(read(text), made)
    assert as_text(read(text)) == text
    validate(read(text), p, m)


@given(drawn=linear_extensions())
def test_so_they_are_in_the_format_of_pytorch_but_for_the_numbers_of_chunks(drawn):
    made, p, m = drawn
    text = as_text(made, "torch")
    assert_same(read(text), with_chunks_ascending(made))
    assert as_text(read(text), "torch") == text
    validate(read(text), p, m)


def test_updates_and_reductions_have_a_text():
    made = programs("pipedream", 3, 4, replicas=[2, 1])
    assert_same(read(as_text(made)), made)
    made = programs("interleaved", 2, 4, chunks=2)
    made[1] += [Reduce(), Reduce(chunk=1)]
    assert as_text(made).endswith(" R R.1\n")
    assert_same(read(as_text(made)), made)
    assert as_text(made, "torch").endswith(",1REDUCE_GRAD,3REDUCE_GRAD\r\n")
    assert_same(read(as_text(made, "torch")), made)


@given(drawn=linear_extensions(), random=st.randoms(use_true_random=False))
def test_what_a_spreadsheet_saves_is_read(drawn, random):
    made = with_chunks_ascending(drawn[0])
    rows = [line.split(",") for line in as_text(made, "torch").splitlines()]
    for row in rows:  # idle cells, and spaces
        for _ in range(random.randrange(4)):
            row.insert(random.randint(0, len(row)), random.choice(["", " "]))
        row[:] = [random.choice([cell, f" {cell}", f"{cell} "]) for cell in row]
    longest = max(map(len, rows)) + random.randrange(2)
    rows = [row + [""] * (longest - len(row)) for row in rows]
    rows += [[""] * longest] * random.randrange(3)
    out = io.StringIO()
    quoting = random.choice([csv.QUOTE_ALL, csv.QUOTE_MINIMAL])
    csv.writer(out, quoting=quoting, lineterminator=random.choice(["\r\n", "\n"])).writerows(rows)
    assert_same(read(random.choice(["", "\ufeff"]) + out.getvalue()), made)


def test_a_file_a_path_and_a_text_are_told_apart(tmp_path, monkeypatch):
    made = read(V)
    for format, name in (("minidist", "own order.txt"), ("torch", "2F0.csv")):
        path = tmp_path / name
        write(made, path, format)
        monkeypatch.chdir(tmp_path)
        for source in (path, str(path), name):
            assert_same(read(source), made)
    write(made, "bom.txt")
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbf" + V.replace("\n", "\r\n").encode())
    assert_same(read("bom.txt"), made)
    for text in ("rank 0 F0 B0", "0F0,0B0", "rank 0: F0 B0\n"):
        assert_same(read(text), programs("gpipe", 1, 1))
    for missing in ("own.txt", "own order.csv", "1f1b", ""):
        with pytest.raises(ValueError, match=f"there is no file '{missing}'"):
            read(missing)
    with pytest.raises(ValueError, match=r"cannot read '.*': Is a directory"):
        read(tmp_path)
    (tmp_path / "sheet.csv").write_bytes(V_OF_TORCH.encode("utf-16"))
    with pytest.raises(ValueError, match=r"sheet.csv is not UTF-8; save it as"):
        read("sheet.csv")


PIECES = [
    *'0123FBIWUR().|,;"#:<> \n\r\t\ufeff\u0663',
    "rank ",
    "placement ",
    "\n0F0,",
    "OVERLAP_F_B",
]


@st.composite
def nearly_texts(draw):
    """Draw a text of programs in which some letters have changed."""
    text = as_text(draw(linear_extensions(max_p=2, max_m=2))[0], draw(st.sampled_from(FORMATS)))
    for _ in range(draw(st.integers(0, 3))):
        at, gone = draw(st.integers(0, len(text))), draw(st.integers(0, 3))
        text = text[:at] + draw(st.sampled_from(["", *PIECES])) + text[at + gone :]
    return text


@settings(max_examples=100)
@given(text=nearly_texts() | st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
def test_any_text_is_programs_or_refused_in_one_line(text):
    try:
        made = read(text)
    except ValueError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 300
        event("refused")
    else:
        assert_same(read(as_text(made)), made)
        event("programs")


# PyTorch's schedules run here, and its loader takes ours. `pytorch/` has small schedules as PyTorch
# 2.15 dumps them; they are certified everywhere.

FILES = Path(__file__).parent / "pytorch"
CLASSES = {  # by file: PyTorch's name and ours
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", "interleaved"),
    "looped_bfs": ("ScheduleLoopedBFS", "looped_bfs"),
    "interleaved_zero_bubble": ("ScheduleInterleavedZeroBubble", "interleaved_zb"),
    "zbv_zero_bubble": ("ScheduleZBVZeroBubble", "zb_v"),
    "dual_pipe_v": ("ScheduleDualPipeV", "dualpipe_v"),
}


def test_a_schedule_that_pytorch_has_dumped_is_ours_and_is_certified(cluster):
    for name, (_, ours) in CLASSES.items():
        text = (FILES / f"{name}.csv").read_bytes().decode()
        made = read(text)
        cells = [",".join(filter(None, row.split(","))) + "\r\n" for row in text.splitlines()]
        assert as_text(made, "torch") == "".join(cells), "the same but for idle moments"
        assert_same(programs(ours, 2, micro_batches_of(made), chunks=2), made)
        for case in cases_of(made):
            row = equivalence.check("pipeline", case, 2, cluster(2, "thread"))
            assert row["ok"], f"{name}, {case.name}: {row['detail']}"


@pytest.fixture
def pipelining():
    reason = "PyTorch is not installed: pip install torch"
    return pytest.importorskip("torch.distributed.pipelining.schedules", reason=reason)


def stages_of_rank_0(made):
    """Return all that PyTorch's schedules ask of a rank's stages before they run."""
    stages = {"num_stages": 1 + last_stage(made.placement), "group_size": len(made)}
    return [
        SimpleNamespace(stage_index=k, group_rank=0, submod=None, **stages)
        for k in sorted(made.placement[0])
    ]


@pytest.mark.slow  # it imports PyTorch
def test_pytorch_dumps_our_orders(pipelining, tmp_path):
    """Action by action; its ZB-V is another order from three ranks, as fast and as small."""
    path = tmp_path / "dump.csv"
    for (name, (theirs, ours)), p, turns in product(CLASSES.items(), (2, 3, 4), (2, 3)):
        m = turns * p
        want = programs(ours, p, m, chunks=2)
        getattr(pipelining, theirs)(stages_of_rank_0(want), m)._dump_csv(path, "compute_only")
        found = read(path)
        if name == "zbv_zero_bubble":
            assert want.placement == found.placement and simulate(want) == simulate(found)
        else:
            assert_same(want, found)
    for name, (theirs, ours) in CLASSES.items():
        m = 4 + (name == "dual_pipe_v")
        stages = stages_of_rank_0(programs(ours, 2, m, chunks=2))
        getattr(pipelining, theirs)(stages, m)._dump_csv(path, "compute_only")
        assert path.read_bytes() == (FILES / f"{name}.csv").read_bytes(), name


@pytest.mark.slow  # it imports PyTorch
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=linear_extensions() | schedules().filter(lambda drawn: not updates(drawn[0])))
def test_pytorch_takes_any_order_that_runs_here(pipelining, tmp_path, drawn):
    """It loads what was written, and adds its communication: it simulates the order."""
    made, _, m = drawn
    path = tmp_path / "ours.csv"
    write(made, path, "torch")
    schedule = pipelining._PipelineScheduleRuntime(stages_of_rank_0(made), m)
    schedule._load_csv(path, format="compute_only")
    loaded = [",".join(map(str, row)) for row in schedule.pipeline_order.values()]
    assert loaded == path.read_text().splitlines()
    ranks = {k: r for r, row in enumerate(made.placement) for k in row}
    assert schedule.stage_index_to_group_rank == ranks
    assert len(schedule.pipeline_order_with_comms) == len(made)
