"""The seconds of a step, from what each rank does in it and this machine's rates."""

import re
from collections.abc import Iterable

from minidist.observe.machine.rates import Rates
from minidist.observe.machine.trace import Act, Call, Log, Mark, Pass
from minidist.planning.shared_cores import Meet, Receive, Send, Step, Work, ends

ACTION = re.compile(r"[FBIWU]\d")


def predicted(traces: list[Log], rates: Rates) -> float:
    """Return the seconds from the common begin of a step until its last rank is done."""
    return float(max(ends([program(trace, rates) for trace in traces], rates.cores)))


def program(trace: Log, rates: Rates) -> list[Step]:
    """Return a rank's step as work, messages and meetings.

    Forward and backward of a graph are spread evenly between the calls around it. Calls of a second
    thread come last: they too need a core.
    """
    own = [e for e in trace if not isinstance(e, Call) or e.own]
    beside = [e for e in trace if isinstance(e, Call) and not e.own]
    steps: list[Step] = []
    passes: dict[str, Pass] = {}
    at_hand: list[Call] = []
    pending, updates, acted = 0.0, 0, None
    for entry in own:
        match entry:
            case Act(name, True) if ACTION.match(name):
                steps += spread(pending, at_hand, rates)
                pending, at_hand, acted = 0.0, [], name
            case Act(name, False) if name == acted:
                if name[0] != "F":
                    pending += sum(_seconds(n, passes, rates, trace) for n in name.split())
                if name[0] == "U":
                    updates += 1
                steps += spread(pending, at_hand, rates)
                pending, at_hand, acted = 0.0, [], None
            case Pass():
                forward, inputs, weights = total(entry, rates)
                if acted:
                    passes[acted[1:]] = entry
                    pending += forward
                else:
                    steps += spread(pending + forward, at_hand, rates)
                    pending, at_hand = inputs + weights, []
            case Call():
                at_hand.append(entry)
            case Mark("sent") | Mark("end"):
                steps += spread(pending, at_hand, rates)
                pending, at_hand = 0.0, []
                if entry.what == "sent" and not updates:
                    steps += spread(0.0, beside, rates)
                    beside = []
                if entry.what == "end" and not updates:
                    steps.append(Work(rates.of("update", entry.numbers)))
    return steps + spread(0.0, beside, rates)


def _seconds(name: str, passes: dict[str, Pass], rates: Rates, trace: Log) -> float:
    """Return the seconds of B, I, W or U."""
    if name[0] == "U":
        return rates.of("update", trace[-1].numbers)
    _, inputs, weights = total(passes[name[1:]], rates)
    return {"B": inputs + weights, "I": inputs, "W": weights}[name[0]]


def total(graph: Pass, rates: Rates) -> tuple[float, float, float]:
    """Return the seconds of a graph's forward, and of the halves of its backward."""
    parts = [rates.seconds(*operation) for operation in graph.operations]
    forward, inputs, weights = zip(*parts, strict=True) if parts else ((), (), ())
    return sum(forward, 0.0), sum(inputs, 0.0), sum(weights, 0.0)


def spread(seconds: float, calls: Iterable[Call], rates: Rates) -> list[Step]:
    """Return calls with this work between them, in equal parts."""
    calls = list(calls)
    part: list[Step] = [Work(seconds / (len(calls) + 1))] if seconds else []
    steps = list(part)
    for call in calls:
        steps += [*communication(call, rates), *part]
    return steps


def communication(call: Call, rates: Rates) -> list[Step]:
    if call.name not in ("send", "recv"):
        work = Work(rates.of((call.name, len(call.ranks)), call.bytes))
        return [Meet(call.ranks, call.key), work]
    if call.ranks[0] == call.ranks[1]:
        return []
    work, lane = Work(rates.of(call.name, call.bytes)), (*call.ranks, call.key)
    return [work, Send(lane, rates.delay)] if call.name == "send" else [Receive(lane), work]
