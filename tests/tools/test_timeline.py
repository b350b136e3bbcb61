"""Pictures of an event log: by hand, of real runs, and of random logs."""

import json
import math
import threading
import time
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import run
from minidist.events import Event, EventLog
from minidist.tools import figures, timeline, timeline_figure
from minidist.tools.chrome_trace import check_chrome_trace, chrome_trace, save_chrome_trace
from minidist.tools.timeline import text
from minidist.tools.tracks import tracks


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


def overlapping():
    return EventLog([Event(0, "first", 0.0, 2.0), Event(0, "second", 1.0, 3.0)])


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
        with pytest.raises(ValueError, match=r"'long'.*'late'.*overlap"):
            picture(log)


def test_a_partial_overlap_names_both_events_and_their_thread():
    with pytest.raises(ValueError, match=r"'first' .* and 'second' .* overlap on rank 0, thread"):
        chrome_trace(overlapping())


@pytest.mark.parametrize("start, end", [(2.0, 1.0), (0.0, math.inf), (math.nan, 1.0)])
def test_an_event_that_does_not_end_after_its_start_is_refused(start, end):
    with pytest.raises(ValueError, match="'odd' of rank 3 starts at"):
        text(EventLog([Event(3, "odd", start, end)]))


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


def test_text_falls_back_from_brackets_to_names_to_letters():
    events = [Event(0, "one", 0, 3), Event(0, "two", 3, 8), Event(0, "four", 8, 33)]
    assert text(EventLog(events), 40).split("\n")[1] == "rank 0 one[two][----------four---------]"
    log = EventLog([Event(0, "forward 3", 0.0, 0.1), Event(0, "rest", 0.1, 1.0)])
    assert text(log, 40).split("\n")[1] == "rank 0 fff[------------rest------------]"


def test_text_keeps_an_outer_event_visible_around_the_inner_ones():
    log = EventLog([Event(0, "inner", 0.4, 0.6), Event(0, "outer", 0.0, 1.0)])
    row = text(log, 57).split("\n")[1].removeprefix("rank 0 ")
    assert row == "o" * 20 + "[-inner--]" + "o" * 20


def test_an_event_shorter_than_a_column_still_shows():
    log = EventLog([Event(0, "work", 0.0, 1.0), Event(0, "tick", 1.0, 1.0 + 1e-6)])
    log.events.append(Event(0, "more", 1.0 + 1e-6, 2.0))
    row = text(log, 60).split("\n")[1]
    assert "work" in row and "]t[" in row and "more" in row


@pytest.mark.parametrize("span, unit", [(7.0, "s"), (0.02, "ms"), (4e-6, "us"), (0.0, "us")])
def test_the_unit_of_the_scale_follows_the_span(span, unit):
    line = text(EventLog([Event(0, "a", 1.0, 1.0 + span)])).split("\n")[0]
    assert line.startswith(f"{unit:<7}|0")


def test_an_empty_log_says_so():
    assert text(EventLog()) == "no events in the log"
    assert chrome_trace(EventLog())["traceEvents"] == []
    check_chrome_trace(chrome_trace(EventLog()))


def test_too_narrow_a_text_is_refused():
    with pytest.raises(ValueError, match="40 columns or more, not 39"):
        text(by_hand(), 39)


def test_a_trace_has_a_process_per_rank_and_a_thread_per_thread():
    trace = chrome_trace(by_hand())["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert named == {(0, 0): "main", (0, 2): "buckets", (1, 1): "main", (1, 2): "buckets"}
    processes = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    order = [e["args"]["sort_index"] for e in trace if e["name"] == "thread_sort_index"]
    assert order == [0, 1, 2, 3]
    reduce = next(e for e in trace if e["name"] == "all_reduce w")
    assert (reduce["ts"], reduce["dur"], reduce["cat"]) == (4000.0, 3000.0, "communication")
    assert reduce["args"] == {"bytes": 4000}


def test_children_stay_inside_parents_whatever_the_clock_rounds():
    starts = [0.1 * n + 1e-9 for n in range(200)]
    log = EventLog()
    for start in starts:
        log.events.append(Event(0, "child", start + 0.01, start + 0.0999999))
        log.events.append(Event(0, "parent", start, start + 0.0999999))
    check_chrome_trace(json.loads(json.dumps(chrome_trace(log))))
    assert [depth for depth, _ in tracks(log)[0, "main"]] == [0, 1] * 200


def test_of_equal_intervals_the_one_logged_last_is_the_outer_one():
    log = EventLog([Event(0, "inner", 1.0, 2.0), Event(0, "outer", 1.0, 2.0)])
    assert [(d, e.name) for d, e in tracks(log)[0, "main"]] == [(0, "outer"), (1, "inner")]


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_a_real_run_with_two_threads_per_rank_passes(transport, tmp_path):
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
            with group.waiting("the other thread"):
                thread.join()
            group.all_reduce(np.ones(2))
        group.barrier()

    log = EventLog()
    run(worker, 2, transport=transport, log=log)
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


def broken(change):
    trace = chrome_trace(by_hand())
    change(trace, next(e for e in trace["traceEvents"] if e["ph"] == "X"))
    return trace


def drop(name):
    def change(trace, _):
        trace["traceEvents"] = [e for e in trace["traceEvents"] if e["name"] != name]

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(lambda _, e, key=key: e.pop(key) for key in ("ph", "name", "cat", "pid", "tid", "args")),
        *(lambda _, e, key=key: e.pop(key) for key in ("ts", "dur")),
        *(lambda _, e, bad=bad: e.update(dur=bad) for bad in (-1.0, math.nan, "3", None, True)),
        *(lambda _, e, bad=bad: e.update(ts=bad) for bad in (-0.125, math.inf)),
        lambda _, e: e.update(ph="B"),
        lambda _, e: e.update(pid=0.0),
        lambda _, e: e.update(tid=77),
        lambda _, e: e.update(args={}),
        lambda _, e: e.update(args={"bytes": -1}),
        lambda _, e: e.update(ts=1000.0),
        lambda trace, _: trace.pop("displayTimeUnit"),
        lambda trace, _: trace.pop("traceEvents"),
        lambda trace, _: trace["traceEvents"].append(7),
        drop("process_name"),
        drop("thread_name"),
    ],
)
def test_the_checker_finds_what_is_wrong(change):
    check_chrome_trace(chrome_trace(by_hand()))
    with pytest.raises(ValueError):
        check_chrome_trace(broken(change))


@pytest.mark.parametrize(
    "count, words",
    [(64, "64 B"), (999, "999 B"), (4200, "4.2 kB"), (999_500, "1 MB"), (5 * 10**9, "5 GB")],
)
def test_bytes_have_three_digits(count, words):
    assert timeline_figure.bytes_text(count) == words


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


def test_names_stand_only_where_they_fit(drawn):
    events = [Event(0, f"all_reduce {n}", n * 1e-3, (n + 1) * 1e-3) for n in range(300)]
    figure = drawn(EventLog(events))
    assert bars(figure) == 300 and not figure.axes[0].texts


def test_a_pipeline_names_its_micro_batches_in_its_bars(drawn):
    figure = drawn(pipeline())
    assert [words.get_text() for words in figure.axes[0].texts] == "0 1 2 2 1 0".split()
    assert [key.get_text() for key in figure.legends[0].get_texts()] == ["forward", "backward"]


@pytest.mark.parametrize("log", [EventLog(), EventLog([Event(0, "$a_", 1.0, 1.0)])])
def test_a_figure_of_nothing_and_of_an_instant_can_be_drawn(drawn, log, tmp_path):
    figure = drawn(log)
    figure.savefig(tmp_path / "figure.png")
    assert bars(figure) == len(log.events)
