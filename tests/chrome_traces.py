"""What a Chrome trace has to be."""

import math

from minidist.observe.chrome_trace import nesting


def check_chrome_trace(trace: dict) -> None:
    """Fail unless a trace has the form that `chrome_trace` gives it.

    Complete events have all keys, times in us and bytes, both at least 0. On one (pid, tid) they
    nest or are disjoint, without tolerance. Every pid and every (pid, tid) has a name.
    """
    assert trace["displayTimeUnit"] in ("ms", "ns")
    slices, named = {}, set()
    for e in trace["traceEvents"]:
        place = e["pid"], e["tid"]
        assert all(type(number) is int for number in place) and isinstance(e["name"], str)
        if e["ph"] == "X":
            count, times = e["args"]["bytes"], (e["ts"], e["dur"])
            assert isinstance(e["cat"], str) and type(count) is int and count >= 0
            assert all(type(t) in (int, float) and 0 <= t < math.inf for t in times), e
            span = e["ts"], e["ts"] + e["dur"], e["name"]
            slices.setdefault(place, []).append(span)
        else:
            key = "sort_index" if e["name"].endswith("sort_index") else "name"
            assert e["ph"] == "M" and type(e["args"][key]) in (int, str)
            named |= {(e["name"], e["pid"]), (e["name"], *place)}
    for (pid, tid), spans in slices.items():
        assert {("process_name", pid), ("thread_name", pid, tid)} <= named
        nesting(sorted(spans, key=lambda span: (span[0], -span[1])), f"pid {pid}, tid {tid}")
