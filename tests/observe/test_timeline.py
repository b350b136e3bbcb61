"""Pictures of an event log: by hand, of real runs, and of random logs."""

import json
import math
import threading
import time
from dataclasses import replace
from fractions import Fraction
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lessons.support import figures
from minidist import run
from minidist.events import Event, EventLog
from minidist.observe import timeline
from minidist.observe.chrome_trace import chrome_trace, save_chrome_trace, tracks
from minidist.observe.timeline import text
from minidist.pipeline_parallel import SCHEDULES, add_reductions, programs
from minidist.planning import simulate
from tests.chrome_traces import check_chrome_trace
from tests.strategies import chunks_of, fitting


def by_hand():
    """Two ranks of 10 ms; on each a second thread communicates beside backward."""
    log = EventLog()
    for r in (0, 1):
        log.events += [
            Event(r, "forward", 5.0, 5.002),
            Event(r, "backward", 5.002, 5.008),
            Event(r, "update", 5.008, 5.01),
            Event(r, "step", 5.0, 5.01),
            Event(r, "all_reduce w", 5.004, 5.007, "communication", 4000, "buckets"),
        ]
    return log


def pipeline():
    """One rank: F0 F1 F2 B2 B1 B0, backward twice as long."""
    starts = {"F0": 0, "F1": 1, "F2": 2, "B2": 3, "B1": 5, "B0": 7}
    spans = [(n, t * 1e-3, (t + 1 + (n[0] == "B")) * 1e-3) for n, t in starts.items()]
    return EventLog([Event(0, *span) for span in spans])


names = st.one_of(st.sampled_from(["F0", "B12", "all_reduce w", "", "7", "step"]), st.text())
times = st.floats(0, 1) | st.integers(0, 4).map(lambda n: n * 1e-7)


def nested(draw, start, end, depth):
    """Draw (start, end) pairs inside an interval, children before their parents, as a log does."""
    cuts = sorted(start + draw(times) * (end - start) for _ in range(2 * draw(st.integers(0, 2))))
    cuts = [min(cut, end) for cut in cuts]
    spans = []
    for a, b in zip(cuts[::2], cuts[1::2], strict=True):
        spans += nested(draw, a, b, depth - 1) if depth else []
        spans.append((a, b))
    return spans


@st.composite
def logs(draw):
    """Draw a log whose events nest on every thread, at any scale and distance from time 0."""
    log, zero = EventLog(), draw(st.sampled_from([0.0, 1.0, 123456.789]))
    scale = draw(st.sampled_from([1e-7, 1e-6, 1e-3, 1.0, 3e5]))
    for rank in range(draw(st.integers(0, 3))):
        for thread in draw(st.lists(st.sampled_from(["main", "a", "Thread-1 (f)"]), unique=True)):
            for start, end in nested(draw, zero, zero + scale, 3):
                category = draw(st.sampled_from(["compute", "communication"]))
                count = draw(st.integers(0, 1 << 40))
                log.events.append(Event(rank, draw(names), start, end, category, count, thread))
    return log


@given(logs(), st.integers(40, 130))
def test_logs_that_nest_become_valid_traces_and_texts_that_fit(log, width):
    trace = json.loads(json.dumps(chrome_trace(log), allow_nan=False))
    check_chrome_trace(trace)
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(complete) == len(log.events)
    assert sorted(e["args"]["bytes"] for e in complete) == sorted(e.bytes for e in log.events)
    assert all(0 <= e["ts"] and e["ts"] * 8 % 1 == 0 == e["dur"] * 8 % 1 for e in complete)
    lines = text(log, width).split("\n")
    assert max(map(len, lines)) <= width and all(line.isprintable() for line in lines)
    assert len(lines) >= 1 + len(tracks(log))


@given(logs().filter(lambda log: len(log.events) > 0), st.data())
def test_a_partial_overlap_anywhere_is_refused(log, data):
    victim = data.draw(st.sampled_from(log.events))
    long = replace(victim, start=victim.start, end=victim.start + 2.0, name="long")
    late = replace(victim, start=victim.start + 1.0, end=victim.start + 3.0, name="late")
    log = EventLog([long, late, *(e for e in log.events if e.thread != victim.thread)])
    for picture in (text, chrome_trace):
        with pytest.raises(
            ValueError, match=r"'long'.*'late'.*overlap on .*(rank|pid) \d+, (thread|tid)"
        ):
            picture(log)


def test_text_shows_communication_beside_compute():
    assert text(by_hand(), 80).split("\n") == [
        "ms             |0           |2           |4           |6           |8",
        "rank 0 main    [--forward--][---------------backward--------------][---update--]",
        "rank 0 buckets                           [---all_reduce w--]",
        "rank 1 main    [--forward--][---------------backward--------------][---update--]",
        "rank 1 buckets                           [---all_reduce w--]",
        "compute: s = step, f = forward, b = backward, u = update",
        "communication: a = all_reduce",
    ]


def row_of(*events, width=40, unit="s"):
    return text(EventLog([Event(0, *each) for each in events], unit=unit), width).split("\n")[1]


def test_a_narrow_event_has_its_name_without_brackets_or_its_letter_and_none_hides_another():
    row = row_of(("one", 0, 3), ("two", 3, 8), ("four", 8, 33))
    assert row == "rank 0 one[two][----------four---------]"
    assert row_of(("forward 3", 0.0, 0.1), ("rest", 0.1, 1.0)) == (
        "rank 0 fff[------------rest------------]"
    )
    outer = row_of(("inner", 0.4, 0.6), ("outer", 0.0, 1.0), width=57)
    assert outer == "rank 0 " + "o" * 20 + "[-inner--]" + "o" * 20
    short = row_of(
        ("work", 0.0, 1.0), ("tick", 1.0, 1.0 + 1e-6), ("more", 1.0 + 1e-6, 2.0), width=60
    )
    assert "work" in short and "]t[" in short and "more" in short


def test_of_an_action_the_picture_shows_its_micro_batches_and_not_what_is_inside():
    halves = row_of(("F0", 0, 2), ("I0", 2, 4), ("W0 W1 W2", 4, 10), unit="units", width=100)
    assert halves == "rank 0 F0--I0==W0-2~~~~~~~~"
    assert row_of(("W0 W2", 0, 8), unit="units", width=100) == "rank 0 W0,2~~~~"
    real = [("F0", 0, 2), ("B0", 2, 6), ("R", 6, 9, "communication")]
    inside = "all_reduce copies", 7, 8, "communication"
    assert row_of(*real, inside, unit="units", width=100) == "rank 0 F0--B0======R#####"


def test_what_cannot_be_drawn_or_written_is_refused_before_anything_is_drawn():
    for call, words in [
        (lambda: text(by_hand(), 39), "40 columns or more, not 39"),
        (lambda: text(EventLog([Event(3, "odd", 2.0, 1.0)])), "'odd' of rank 3 starts at"),
        (lambda: text(EventLog([Event(3, "odd", math.nan, 1.0)])), "'odd' of rank 3 starts at"),
        (lambda: timeline.check_path("txt"), "not 'txt'"),
        (
            lambda: timeline.save(EventLog(), "a.gif"),
            r"a timeline is a file \*.txt, .*, not 'a.gif'",
        ),
        (lambda: timeline.save(EventLog(), "/nowhere/a.txt"), "there is no folder '/nowhere'"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


def test_a_real_run_with_two_threads_per_rank_passes(tmp_path):
    def worker(group):
        other = group.split(0)

        def communicate():
            for b in range(2):
                other.all_reduce(np.ones(1000), label=f"bucket {b}")

        with group.log.span("step"):
            thread = threading.Thread(target=communicate, name="buckets")
            thread.start()
            with group.log.span("backward"), group.log.span("layer 1"):
                time.sleep(0.01)
            with group.waiting("the other thread", thread):
                thread.join()
            group.all_reduce(np.ones(2))
        group.barrier()

    log = EventLog()
    run(worker, 2, log=log)
    save_chrome_trace(log, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    check_chrome_trace(trace)
    assert trace == chrome_trace(log)
    rows = tracks(log)
    assert list(rows) == [(0, "main"), (0, "buckets"), (1, "main"), (1, "buckets")]
    for rank in (0, 1):
        depths = {e.name: depth for depth, e in rows[rank, "main"]}
        want = {"step": 0, "backward": 1, "layer 1": 2, "all_reduce": 1, "barrier": 0}
        assert depths == want
        assert [e.name[-1] for _, e in rows[rank, "buckets"]] == ["0", "1"]
    assert "rank 1 buckets" in text(log) and "all_reduce" in text(log)


@pytest.fixture
def drawn():
    """Return a function that draws a log, and close the figures afterwards."""
    if find_spec("matplotlib") is None:
        pytest.skip("no matplotlib, which draws the figures: pip install 'minidist[lessons]'")
    plt = figures.pyplot()
    yield timeline.draw
    plt.close("all")


def bars(figure):
    return sum(len(group.get_paths()) for group in figure.axes[0].collections)


def test_a_figure_has_a_bar_per_event_and_a_row_per_thread(drawn):
    figure = drawn(by_hand(), "Two ranks")
    axes = figure.axes[0]
    assert bars(figure) == len(by_hand().events)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["rank 0 main", "rank 0 buckets", "rank 1 main", "rank 1 buckets"]
    assert axes.get_xlim()[0] == 0 and axes.get_xlim()[1] == pytest.approx(10)
    words = [words.get_text() for words in axes.texts]
    assert words.count("all_reduce w, 4 kB") == 2 and words.count("backward") == 2


def simulated(schedule, p, m, chunks=1, **durations):
    return simulate(programs(schedule, p, m, chunks), **durations).timeline


PICTURES = {
    ("1f1b", 4, 8): [
        "units  |0        |5        |10       |15       |20       |25       |30",
        "rank 0 F0F1F2F3............B0==F4B1==F5B2==F6B3==F7B4==..B5==..B6==..B7==",
        "rank 1 ..F0F1F2........B0==F3B1==F4B2==F5B3==F6B4==F7B5==..B6==..B7==....",
        "rank 2 ....F0F1....B0==F2B1==F3B2==F4B3==F5B4==F6B5==F7B6==..B7==........",
        "rank 3 ......F0B0==F1B1==F2B2==F3B3==F4B4==F5B5==F6B6==F7B7==............",
        "F forward, B backward, . idle",
        "2 columns are 1 unit",
    ],
    ("zb_v", 2, 3, 2): [
        "units  |0          |2          |4          |6          |8",
        "rank 0 F0-F1-F2-f0-i0=w0~f1-i1=w1~I0=W0~f2-i2=w2~I1=W1~I2=W2~...",
        "rank 1 ...F0-f0-F1-f1-i0=w0~F2-I0=W0~f2-i1=w1~I1=i2=I2=W1~w2~W2~",
        "F forward, I input half of backward, W weight half of backward, . idle, lower case: "
        "chunk 1",
        "6 columns are 1 unit",
    ],
    ("pipedream", 3, 4): [
        "units  |0             |5             |10            |15            |20",
        "rank 0 F0-F1-F2-............B0====U0+F3-B1====U1+...B2====U2+...B3====U3+",
        "rank 1 ...F0-F1-......B0====U0+F2-B1====U1+F3-B2====U2+...B3====U3+......",
        "rank 2 ......F0-B0====U0+F1-B1====U1+F2-B2====U2+F3-B3====U3+............",
        "F forward, B backward, U update, . idle",
        "3 columns are 1 unit",
    ],
}


def test_a_simulated_schedule_is_the_papers_picture():
    for shape, lines in PICTURES.items():
        assert text(simulated(*shape, update=1)).split("\n") == lines


def test_a_picture_too_wide_for_one_line_stands_in_parts():
    assert text(simulated("1f1b", 2, 6), 40).split("\n") == [
        "units  |0        |5        |10",
        "rank 0 F0F1....B0==F2B1==F3B2==F4B3==F5",
        "rank 1 ..F0B0==F1B1==F2B2==F3B3==F4B4==",
        "",
        "units          |20",
        "rank 0 B4==..B5==",
        "rank 1 F5B5==....",
        "F forward, B backward, . idle",
        "2 columns are 1 unit; in 2 parts, one",
        "  below the other",
    ]


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(
        st.sampled_from([1, 2, 3, Fraction(1, 2), 0.5, Fraction(4, 3)]), min_size=4, max_size=4
    ),
    st.integers(40, 120),
)
def test_every_cell_of_an_exact_picture_is_as_wide_as_its_action_is_long(
    name, p, n, lengths, width
):
    chunks = chunks_of(name)
    kinds = ("forward", "backward_input", "backward_weight", "update")
    m = fitting(name, p, n * p)
    log = simulated(name, p, m, chunks, **dict(zip(kinds, lengths, strict=True)), latency=1)
    lines = text(log, width).split("\n")
    scale = next(line for line in lines if " columns are 1 unit" in line or "scaled" in line)
    if "scaled" in scale:
        return
    per_unit = int(scale.split()[0])
    for rank in range(p):
        row = "".join(line[7:] for line in lines if line.startswith(f"rank {rank} "))
        want = [None] * len(row)
        for e in (e for e in log.events if e.rank == rank):
            first, stop = (round(t * per_unit) for t in (e.start, e.end))
            sign, (i, _, chunk) = e.name[0], e.name[1:].partition(".")
            shown = sign.lower() if chunk else sign
            cell = f"{shown}{i}".ljust(stop - first, {"F": "-", "W": "~", "U": "+"}.get(sign, "="))
            assert want[first:stop] == [None] * (stop - first) and len(cell) == stop - first
            want[first:stop] = cell
        assert row == "".join(c or "." for c in want)


def test_the_sums_that_r_begins_have_a_row_and_a_track_of_their_own(drawn):
    log = simulate(add_reductions(programs("looped_bfs", 1, 2, 2)), reduce=2).timeline
    assert text(log).split("\n") == [
        "units       |0          |2          |4          |6",
        "rank 0 main F0-F1-f0-f1-b1====b0====B1====B0====......",
        "rank 0 sums ........................r#####......R#####",
        "F forward, B backward, R sum over ranks, . idle, lower case: chunk 1",
        "6 columns are 1 unit",
    ]
    figure = drawn(log)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "rank 0 main",
        "rank 0 sums",
    ]
    legend = [entry.get_text() for entry in figure.legends[0].get_texts()]
    assert legend[-1] == "sum over ranks (chunks 0, 1)"
    trace = chrome_trace(log)
    check_chrome_trace(trace)
    sums = [e for e in trace["traceEvents"] if e.get("cat") == "communication"]
    assert [e["name"] for e in sums] == ["R.1", "R"] and {e["tid"] for e in sums} == {1}


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "pipedream"])
def test_a_programs_figure_has_a_bar_and_a_number_per_action(drawn, name):
    chunks = chunks_of(name)
    log = simulated(name, 2, 4, chunks, update=1)
    figure = drawn(log, name)
    assert bars(figure) == len(log.events)
    numbers = [words.get_text() for words in figure.axes[0].texts]
    assert sorted(numbers) == sorted(e.name[1:].partition(".")[0] for e in log.events)
    colors = {tuple(group.get_facecolor()[0].round(3)) for group in figure.axes[0].collections}
    kinds = {e.name[0].replace("I", "B") for e in log.events}  # these two have one colour
    assert len(colors) == chunks * len(kinds)
    assert figure.axes[0].get_xlabel() == "time (units)"
    labels = [key.get_text() for key in figure.legends[0].get_texts()]
    assert all(("(chunks 0, 1)" in label) == (chunks == 2) for label in labels)


def test_figures_are_written_as_their_ending_says_with_the_same_bytes_again(drawn, tmp_path):
    for ending, begin in [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?x")]:
        paths = [tmp_path / f"{n}{ending}" for n in (0, 1)]
        for path in paths:
            timeline.save(simulated("gpipe", 2, 2), path, "GPipe")
        assert paths[0].read_bytes().startswith(begin)
        if ending != ".svg":  # whose ids are random
            assert paths[0].read_bytes() == paths[1].read_bytes()
