"""PyTorch's schedules run here, and its loader takes ours: the text of programs, both ways.

`pytorch/` has small schedules as PyTorch 2.15 dumps them; they are certified everywhere. Where
PyTorch is installed, larger ones are dumped anew, and its loader reads what `write` has written.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings

from minidist.pipeline_parallel import programs, read, validate, write
from minidist.pipeline_parallel.actions import BackwardInput, last_stage, micro_batches_of
from minidist.pipeline_parallel.schedules import SCHEDULES
from minidist.pipeline_parallel.text import as_text
from minidist.planning import simulate
from minidist.verify import equivalence
from minidist.verify.strategies.pipeline_parallel import cases_of
from tests.pipeline_parallel.oracles import assert_same
from tests.strategies import SYNCHRONOUS, linear_extensions

FILES = sorted((Path(__file__).parent / "pytorch").glob("*.csv"))
CLASSES = {  # by file; whether rank r holds stages r and 2p - 1 - r, rather than r and p + r
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", False),
    "looped_bfs": ("ScheduleLoopedBFS", False),
    "interleaved_zero_bubble": ("ScheduleInterleavedZeroBubble", False),
    "zbv_zero_bubble": ("ScheduleZBVZeroBubble", True),
    "dual_pipe_v": ("ScheduleDualPipeV", True),
}


@pytest.fixture
def pipelining():
    reason = "PyTorch is not installed: pip install torch"
    return pytest.importorskip("torch.distributed.pipelining.schedules", reason=reason)


def stages_of_rank_0(stages, p, own):
    """Return all that PyTorch's schedules ask of a rank's stages before they run."""
    return [
        SimpleNamespace(stage_index=k, num_stages=stages, group_size=p, group_rank=0, submod=None)
        for k in own
    ]


def dumped(pipelining, name, p, m, path):
    kind, vee = CLASSES[name]
    stages = stages_of_rank_0(2 * p, p, [0, 2 * p - 1 if vee else p])
    getattr(pipelining, kind)(stages, m)._dump_csv(path, format="compute_only")
    return path.read_bytes().decode()


def without_idle_cells(text):
    return "".join(",".join(filter(None, row.split(","))) + "\r\n" for row in text.splitlines())


def assert_runs_here(text, p, m, ranks):
    """Read a dump, write the same but for idle moments, train on its order, compare."""
    made = read(text)
    assert (len(made), micro_batches_of(made)) == (p, m)
    assert as_text(made, "torch") == without_idle_cells(text)
    validate(made, p, m)
    for case in cases_of(made):
        row = equivalence.check("pipeline", case, p, ranks)
        assert row["ok"], f"{case.name}: {row['detail']}"
    return made


def test_every_class_has_a_file():
    assert {path.stem for path in FILES} == set(CLASSES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_schedule_that_pytorch_has_dumped_is_certified(cluster, path):
    text = path.read_bytes().decode()
    made = assert_runs_here(text, 2, 4 + (path.stem == "dual_pipe_v"), cluster(2, "thread"))
    assert made.placement == ([[0, 3], [1, 2]] if CLASSES[path.stem][1] else [[0, 2], [1, 3]])
    assert bool(made.pairs) == (path.stem == "dual_pipe_v")


def test_what_is_in_the_files_is_what_pytorch_says():
    """Some of it, by hand: whose halves there are, and which neighbours overlap."""
    dual = read(Path(__file__).parent / "pytorch" / "dual_pipe_v.csv")
    assert len(dual.pairs) == 10 and sum(r == 0 for r, _, _ in dual.pairs) == 5
    halves = [sum(isinstance(a, BackwardInput) for a in program) for program in dual]
    assert halves == [3, 2]
    bfs = read(Path(__file__).parent / "pytorch" / "looped_bfs.csv")
    forwards = "F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1"
    assert as_text(bfs).splitlines()[1].startswith(f"rank 0     {forwards} B3.1 B2.1")


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("name", CLASSES)
def test_pytorch_dumps_what_is_trained_here(pipelining, cluster, tmp_path, name, p):
    m = 2 * p + (name == "dual_pipe_v")
    text = dumped(pipelining, name, p, m, tmp_path / "dump.csv")
    assert_runs_here(text, p, m, cluster(p, "thread"))
    if p == 2:
        (path,) = [path for path in FILES if path.stem == name]
        assert path.read_bytes().decode() == text, f"{path.name} is not what PyTorch dumps"


OURS = {
    "interleaved_1f1b": "interleaved",
    "looped_bfs": "looped_bfs",
    "interleaved_zero_bubble": "interleaved_zb",
    "zbv_zero_bubble": "zb_v",
    "dual_pipe_v": "dualpipe_v",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_pytorch_has_dumped_is_our_schedule_of_that_name(path):
    theirs = read(path)
    ours = programs(OURS[path.stem], 2, micro_batches_of(theirs), chunks=2)
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", CLASSES)
def test_pytorch_and_we_have_the_same_orders(pipelining, tmp_path, name):
    """Action by action; its ZB-V is another order from three ranks, as fast and as small."""
    for p in (2, 3, 4):
        for m in (2 * p, 3 * p):
            theirs = read(dumped(pipelining, name, p, m, tmp_path / "dump.csv"))
            ours = programs(OURS[name], p, m, chunks=2)
            if name == "zbv_zero_bubble":
                assert ours.placement == theirs.placement and simulate(ours) == simulate(theirs)
            else:
                assert_same(ours, theirs)


def assert_pytorch_takes(pipelining, made, m, path):
    """Let PyTorch load what was written, and add its communication: it simulates the order."""
    write(made, path, "torch")
    own = sorted(made.placement[0])
    stages = stages_of_rank_0(1 + last_stage(made.placement), len(made), own)
    schedule = pipelining._PipelineScheduleRuntime(stages, m)
    schedule._load_csv(path, format="compute_only")
    loaded = [",".join(map(str, row)) for row in schedule.pipeline_order.values()]
    assert loaded == path.read_text().splitlines()
    assert schedule.stage_index_to_group_rank == {
        k: r for r, row in enumerate(made.placement) for k in row
    }
    assert len(schedule.pipeline_order_with_comms) == len(made)


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_pytorch_takes_our_schedules(pipelining, tmp_path, schedule):
    for p in (1, 2, 4):
        chunks = min(2, SCHEDULES[schedule].most_chunks or 2)
        made = programs(schedule, p, 2 * p, chunks)
        assert_pytorch_takes(pipelining, made, 2 * p, tmp_path / "ours.csv")


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=linear_extensions())
def test_pytorch_takes_any_order_that_runs_here(pipelining, tmp_path, drawn):
    made, _, m = drawn
    assert_pytorch_takes(pipelining, made, m, tmp_path / "ours.csv")
