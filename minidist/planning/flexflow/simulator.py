"""What a FlexFlow strategy takes: its task graph on the ranks and links of a machine.

    h = X V, cut along b over ranks 0 and 1;  y = h W, cut along o:

    rank 0   F h.0 -------------> F y.0   B y.0 -------------> B h.0  -> sum V
    rank 1   F h.1 ----.  .-----> F y.1   B y.1 ----.  .-----> B h.1  -> sum V
    sends 0             h.0 > y.1                    y.0 > h.1
    sends 1             h.1 > y.0                    y.1 > h.0

Every part of an op is a task of its rank, forward and backward. Where a part needs what another
rank has, a transfer is a task of the sender's link, of latency + bytes / bandwidth. In backward,
gradients go back along every edge. Parts that cut a letter which their output does not have are
partial sums, and all of them go to whatever needs the output. Ranks that use the same piece of a
parameter add up its gradients along a ring: each of n sends 2 (n - 1) / n of its bytes.

Jia, Zaharia, Aiken 2019, section 5.1, with assumptions A1-A4. Theirs has a link for each pair of
ranks and no latency; here a rank has one link to its node and one to all other nodes, since the
rates of a Machine are per rank. A part takes the roofline's time, in backward as much for every
input that has a gradient. To read the data, to add partial sums up where they are needed, and to
update the parameters takes no time.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

from minidist.errors import WrongInput
from minidist.events import Event, EventLog
from minidist.planning.flexflow.soap import Box, Cut, check, pieces, shared
from minidist.planning.flexflow.task_graph import TaskGraph
from minidist.planning.graphs.gradients import check_loss
from minidist.planning.plans.plan import Machine

if TYPE_CHECKING:
    from minidist.planning.graphs.graph import Graph, Op

Strategy = dict[str, Cut]  # {output of an op: its cut}


@dataclass(frozen=True)
class TaskSimulation:
    """The result of a strategy.

    seconds    until the last task has ended
    memory     bytes per rank: all that its tasks read or write, once; parameters twice, for their
               gradients. So every output is kept for backward.
    sent       bytes per rank
    busy       seconds per rank in which it computes
    """

    seconds: float
    memory: list[int]
    sent: list
    busy: list
    tasks: TaskGraph = field(repr=False, compare=False)

    @property
    def timeline(self) -> EventLog:
        """All tasks, as events."""
        events, tasks = [], self.tasks
        for task, end in enumerate(tasks.replay()):
            name, start, device = tasks.names[task], end - tasks.seconds[task], tasks.devices[task]
            if isinstance(device, int):
                events.append(Event(device, name, start, end))
            else:
                kind, sender = device
                sends = "communication", tasks.bytes[task], kind
                events.append(Event(sender, name, start, end, *sends))
        return EventLog(sorted(events, key=lambda event: event.end))


class Simulator:
    """Simulate strategies for one graph on one machine; what two strategies share is cut once."""

    def __init__(self, graph: "Graph", machine: Machine):
        if machine.cores is not None and machine.cores < machine.ranks:
            raise WrongInput(
                f"{machine.ranks} ranks on {machine.cores} cores: tasks know no shared cores; "
                "use cores=None"
            )
        check_loss(graph)
        self.graph, self.machine = graph, machine
        self.makers = {op.output: op for op in graph.ops}
        self.users: dict[str, list[tuple[Op, int]]] = defaultdict(list)
        self.learns = {name: value.kind == "parameter" for name, value in graph.values.items()}
        for op in graph.ops:
            self.learns[op.output] = any(self.learns[name] for name in op.inputs)
            for place, name in enumerate(op.inputs):
                self.users[name].append((op, place))
        self.kept: dict = {}  # what was cut, by the cuts that decide it

    def __call__(self, strategy: Strategy) -> TaskSimulation:
        """Return what a strategy takes. ValueError: a cut is missing or does not fit its op."""
        self._check(strategy)
        tasks, memory = TaskGraph(), [0] * self.machine.ranks
        forward = self._forward(tasks, strategy)
        backward = self._backward(tasks, strategy, forward)
        for name, value in self.graph.values.items():
            parameter, unused = value.kind == "parameter", not self.users[name]
            for parts, size in self._pieces(name, strategy):
                ranks = sorted({strategy[op].ranks[part] for op, part in parts})
                for rank in ranks:
                    memory[rank] += (2 if parameter else 1) * size
                done = backward if parameter else forward
                if len(ranks) > 1 and (parameter or unused):  # gradients, or a partial result
                    self._ring(tasks, name, ranks, size, [done[op][part] for op, part in parts])
        sent, busy = [0] * self.machine.ranks, [0] * self.machine.ranks
        for device, seconds, size in zip(tasks.devices, tasks.seconds, tasks.bytes, strict=True):
            if isinstance(device, int):
                busy[device] += seconds
            else:
                sent[device[1]] += size
        return TaskSimulation(max(tasks.replay()), memory, sent, busy, tasks)

    def _check(self, strategy: Strategy) -> None:
        for op in self.graph.ops:
            if op.output not in strategy:
                raise WrongInput(f"the strategy has no cut for {op.output}; give every op one")
            cut = strategy[op.output]
            if (op.output, cut) not in self.kept:
                check(self.graph, op, cut, self.machine.ranks)
                self.kept[op.output, cut] = True

    def _forward(self, tasks: TaskGraph, strategy: Strategy) -> dict[str, list[int]]:
        """Add the tasks of forward; return {output: the number of each part's task}."""
        numbers: dict[str, list[int]] = {}
        for op in self.graph.ops:
            cut = strategy[op.output]
            numbers[op.output] = here = self._parts(tasks, "F", op, cut, 1)
            for place, name in enumerate(op.inputs):
                if name in self.makers:
                    for i, j, size in self._moves(op, place, strategy):
                        self._send(tasks, numbers[name][i], here[j], size)
        return numbers

    def _backward(self, tasks: TaskGraph, strategy: Strategy, forward: dict) -> dict:
        """Add the tasks of backward; return {value: the numbers of its tasks}.

        Only of ops below which a parameter is.
        """
        numbers: dict[str, list[int]] = {}
        for op in reversed(self.graph.ops):
            if gradients := sum(self.learns[name] for name in op.inputs):
                cut = strategy[op.output]
                numbers[op.output] = here = self._parts(tasks, "B", op, cut, gradients)
                for earlier, later in zip(forward[op.output], here, strict=True):
                    tasks.order(earlier, later)
                for user, place in self.users[op.output]:
                    for i, j, size in self._moves(user, place, strategy):
                        self._send(tasks, numbers[user.output][j], here[i], size)
        return numbers

    def _parts(self, tasks: TaskGraph, kind: str, op: "Op", cut: Cut, times: int) -> list[int]:
        seconds = times * self._seconds(op, cut)
        named = [f"{kind} {op.output}.{part}" for part in range(cut.parts)]
        return [tasks.add(name, r, seconds) for name, r in zip(named, cut.ranks, strict=True)]

    def _send(self, tasks: TaskGraph, after: int, then: int, size: int) -> None:
        """Let a task wait for another, and for the bytes to arrive if it is on another rank."""
        sender, receiver = tasks.devices[after], tasks.devices[then]
        if sender != receiver and isinstance(sender, int) and isinstance(receiver, int):
            name = f"{tasks.names[after][2:]} > {tasks.names[then][2:]}"
            after = tasks.add(name, *self._link(sender, receiver, size), [after], size)
        tasks.order(after, then)

    def _ring(self, tasks: TaskGraph, name: str, ranks: list[int], size: int, after: list) -> None:
        """Add up `size` bytes of each of n ranks, in 2 (n - 1) steps of 1/n of them."""
        n = len(ranks)
        for sender, receiver in zip(ranks, ranks[1:] + ranks[:1], strict=True):
            link, step = self._link(sender, receiver, size / n)
            tasks.add(f"sum {name}", link, 2 * (n - 1) * step, after, 2 * (n - 1) * size / n)

    def _link(self, sender: int, receiver: int, size) -> tuple[tuple[str, int], float]:
        """Return the link from one rank to another, and the seconds of a message on it."""
        machine = self.machine
        inside = sender // machine.per_node == receiver // machine.per_node
        rate = machine.link if inside else machine.network
        return ("link" if inside else "network", sender), machine.latency + size / rate

    def _seconds(self, op: "Op", cut: Cut) -> float:
        """Return the seconds of one part: the roofline of 2 FLOPs per product, else 1 each."""
        key = "seconds", op.output, cut.degrees
        if key not in self.kept:
            n, machine = self.graph.lengths(op), self.machine
            for letter, degree in cut.degrees:
                n[letter] //= degree
            if op.kind in ("embedding", "take", "slice"):  # it reads the rows that it needs
                n |= dict.fromkeys(set(n) - set(op.terms[1]), 1)
            work = (2 if op.kind == "matmul" else 1) * math.prod(n.values()) / machine.flops
            touched = sum(
                self._bytes(name, math.prod(n[letter] for letter in letters))
                for name, letters in op.operands
            )
            self.kept[key] = machine.overhead + max(work, touched / machine.memory_bandwidth)
        return self.kept[key]

    def _bytes(self, name: str, elements: int) -> int:
        value = self.graph.values[name]
        return elements * (value.nbytes // max(1, math.prod(value.shape)))

    def _moves(self, op: "Op", place: int, strategy: Strategy) -> list[tuple[int, int, int]]:
        """Return (part that makes, part that uses, bytes that both have) of one input of an op."""
        name = op.inputs[place]
        made, used = strategy[name], strategy[op.output]
        key = op.output, place, made, used
        if key not in self.kept:
            there = self._boxes(self.makers[name], None, made)
            here = self._boxes(op, place, used)
            self.kept[key] = [
                (i, j, self._bytes(name, size))
                for (i, a), (j, b) in product(enumerate(there), enumerate(here))
                if (size := shared(a, b))
            ]
        return self.kept[key]

    def _pieces(self, name: str, strategy: Strategy) -> list[tuple[list, int]]:
        """Return ([(op, part), ...], bytes) per piece of a value: all that read or write it."""
        touching: list[tuple[Op, int | None]] = list(self.users[name])
        if name in self.makers:
            touching.append((self.makers[name], None))
        key = name, tuple(strategy[op.output] for op, _ in touching)
        if key not in self.kept:
            boxes = [
                ((op.output, part), box)
                for op, place in touching
                for part, box in enumerate(self._boxes(op, place, strategy[op.output]))
            ]
            found = pieces(boxes).items()
            self.kept[key] = [(sorted(p), self._bytes(name, size)) for p, size in found]
        return self.kept[key]

    def _boxes(self, op: "Op", place: int | None, cut: Cut) -> list[Box]:
        """Return what each part reads of an input; place None: writes."""
        name, letters = op.operands[-1 if place is None else place]
        boxes = cut.boxes(letters, self.graph.values[name].shape)
        if place is None or op.kind not in ("take", "slice"):
            return boxes
        first, last = (*op.options, op.options[0] + 1)[:2]  # of the axis that it takes from
        return [
            tuple((first, last) if x in op.whole else s for x, s in zip(letters, box, strict=True))
            for box in boxes
        ]
