"""FlexFlow: cut every op its own way, simulate what that takes, and search by a random walk.

A cut is one of the ways that the paper calls SOAP:

    bti,io->bto    Y[b, t, o] = sum_i X[b, t, i] W[i, o]

    b  sample      the axis of the examples; it cuts what the batch cuts
    t  attribute   an axis of every example; it cuts no parameter
    o  parameter   it cuts W
    -  operator    which ranks have this op: another op may run at the same time on others
    i  reduction   summed over: not in the paper; the parts are partial sums, added where they go

    Cut((("b", 2), ("o", 2)), first=4)    rank 4  X[:B/2], W[:, :F/2] -> Y[:B/2, :, :F/2]
                                          rank 5  X[:B/2], W[:, F/2:] -> Y[:B/2, :, F/2:]
                                          rank 6  X[B/2:], W[:, :F/2] -> Y[B/2:, :, :F/2]
                                          rank 7  X[B/2:], W[:, F/2:] -> Y[B/2:, :, F/2:]

A strategy, a cut for each op, becomes tasks on the ranks and links of a machine (clock.py):

    h = X V, cut along b over ranks 0 and 1;  y = h W, cut along o:

    rank 0   F h.0 -------------> F y.0   B y.0 -------------> B h.0  -> sum V
    rank 1   F h.1 ----.  .-----> F y.1   B y.1 ----.  .-----> B h.1  -> sum V
    sends 0             h.0 > y.1                    y.0 > h.1
    sends 1             h.1 > y.0                    y.1 > h.0

The walk visits a strategy S with a probability in proportion to exp(-beta cost(S)), if the cost is
the simulated time: fast strategies often, slow ones sometimes, so that it leaves a valley again:

    S   h: b in 2 on ranks 0 1    y: b in 2 on ranks 0 1    3.0 ms   data parallelism
        propose for y             y: o in 2 on ranks 0 1    2.6 ms   better: taken
    S'  h: b in 2 on ranks 0 1    y: o in 2 on ranks 0 1    2.6 ms
        propose for h             h: whole, on rank 1       2.9 ms   worse: taken with probability
                                                                     exp(beta (2.6 ms - 2.9 ms))

Jia, Zaharia, Aiken 2019, Beyond Data and Model Parallelism for Deep Neural Networks, sections 4 to
6. Their parts may have any ranks and a link for each pair, without latency; here, as in the
released code, the parts of an op are equal and have ranks in a row, and a rank has one link to its
node and one to all other nodes, since the rates of a Machine are per rank. To read the data, to add
partial sums up where they are needed, and to update the parameters takes no time. The paper knows
no memory; here a strategy that does not fit is worse than all that fit.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice, pairwise, permutations, product
from numbers import Integral
from operator import attrgetter, itemgetter
from random import Random
from typing import TYPE_CHECKING

from minidist.errors import WrongInput
from minidist.planning.clock import TaskGraph
from minidist.planning.graph import check_loss
from minidist.planning.plans.plan import Machine

if TYPE_CHECKING:
    from minidist.planning.graph import Graph, Op

Box = tuple[tuple[int, int], ...]  # (first, last + 1) per axis: a part of an array
Degrees = tuple[tuple[str, int], ...]  # (letter, parts along it)
MOST_RANKS = 1_000
KINDS = {"S": "sample", "A": "attribute", "P": "parameter", "R": "reduction"}


@dataclass(frozen=True)
class Cut:
    """Cut an op into equal parts.

    degrees    ((letter, parts along it), ...); the last letter changes fastest from part to part
    first      the rank of the first part; each following part has the following rank
    """

    degrees: Degrees = ()
    first: int = 0

    @property
    def parts(self) -> int:
        return math.prod(degree for _, degree in self.degrees)

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.parts)

    def boxes(self, letters: str, shape: tuple[int, ...]) -> list[Box]:
        """Return each part's box of an array whose axes are these letters."""
        return [
            tuple(self._slice(part, letter, n) for letter, n in zip(letters, shape, strict=True))
            for part in range(self.parts)
        ]

    def _slice(self, part: int, letter: str, n: int) -> tuple[int, int]:
        for name, degree in reversed(self.degrees):
            part, place = divmod(part, degree)
            if name == letter:
                return place * n // degree, (place + 1) * n // degree
        return 0, n


def kinds(graph: "Graph") -> dict[str, dict[str, str]]:
    """Return {output of an op: {letter: sample, attribute, parameter or reduction}}.

    The examples are along axis 0 of every input; whole letters are left out.
    """
    samples = {name: 0 for name, value in graph.values.items() if value.kind == "input"}
    by_op = {}
    for op in graph.ops:
        *operands, (_, output) = op.operands
        sample = {letters[samples[name]] for name, letters in operands if name in samples}
        weights = "".join(x for name, x in operands if graph.values[name].kind == "parameter")
        by_op[op.output] = {
            letter: "sample"
            if letter in sample
            else "reduction"
            if letter not in output
            else "parameter"
            if letter in weights
            else "attribute"
            for letter in graph.lengths(op)
            if letter not in op.whole
        }
        for axis, letter in enumerate(output):
            if letter in sample:
                samples[op.output] = axis
    return by_op


def cuts(graph: "Graph", ranks: int, dims: str = "SOAP") -> dict[str, list[Cut]]:
    """Return {output of an op: all its cuts over at most this many ranks}.

    dims    which of S, O, A, P and R may be used; without O the first part is on rank 0
    """
    if wrong := set(dims) - set("SOAPR"):
        raise WrongInput(f"{sorted(wrong)[0]!r} is no dimension of SOAP; use letters of 'SOAPR'")
    if not isinstance(ranks, Integral) or not 1 <= ranks <= MOST_RANKS:
        raise WrongInput(
            f"an op cannot be cut over {ranks} ranks; use 1 or more, and {MOST_RANKS:,} at most, "
            "for a cut begins on any of them"
        )
    allowed, by_op = {KINDS[d] for d in dims if d != "O"}, {}
    for op, kind in zip(graph.ops, kinds(graph).values(), strict=True):
        n = graph.lengths(op)
        letters = [letter for letter in n if kind.get(letter) in allowed]
        by_op[op.output] = [
            Cut(order, first)
            for degrees in _degrees(letters, n, ranks)
            for order in permutations(degrees)
            for first in range(ranks - math.prod(d for _, d in degrees) + 1 if "O" in dims else 1)
        ]
    return by_op


def _degrees(letters: list[str], n: dict[str, int], ranks: int) -> Iterator[tuple]:
    """Yield every ((letter, degree), ...) of at most `ranks` parts; degrees of 1 are left out."""
    if not letters:
        yield ()
        return
    letter, *others = letters
    for degree in range(1, min(ranks, n[letter]) + 1):
        if n[letter] % degree == 0:
            first = ((letter, degree),) if degree > 1 else ()
            for rest in _degrees(others, n, ranks // degree):
                yield first + rest


def check(graph: "Graph", op: "Op", cut: Cut, ranks: int) -> None:
    """Raise ValueError if an op cannot be cut so, or not on so many ranks."""
    n, last, letters = graph.lengths(op), cut.first + cut.parts - 1, dict(cut.degrees)
    if len(letters) < len(cut.degrees):
        raise WrongInput(f"the cut of {op.output} names a letter twice; use one degree for each")
    for letter, degree in letters.items():
        if letter not in n or letter in op.whole:
            raise WrongInput(
                f"the cut of {op.output} splits {letter}, which {op.indices} does not allow; "
                f"use {', '.join(x for x in n if x not in op.whole)}"
            )
        if degree < 1 or n[letter] % degree:
            raise WrongInput(
                f"the cut of {op.output} splits {letter}, of length {n[letter]}, into {degree} "
                "parts that are not equal; use a divisor"
            )
    if not 0 <= cut.first <= last < ranks:
        raise WrongInput(
            f"the cut of {op.output} needs ranks {cut.first} to {last} of {ranks}; use fewer "
            "parts, or another first rank"
        )


def data_parallel(graph: "Graph", ranks: int) -> dict[str, Cut]:
    """Return the strategy that cuts each op along the examples alone, into as many parts as it can.

    What has no axis of examples is done on rank 0.
    """
    options = cuts(graph, ranks, "S").items()
    return {name: max(possible, key=attrgetter("parts")) for name, possible in options}


def shared(a: Box, b: Box) -> int:
    """Return how many elements two boxes have in common."""
    return math.prod(
        max(0, min(top, other_top) - max(low, other_low))
        for (low, top), (other_low, other_top) in zip(a, b, strict=True)
    )


def pieces(boxes: Sequence[tuple[Hashable, Box]]) -> Counter:
    """Return {who has them: elements}, where the boxes of these owners overlap, and no other."""
    elements: Counter = Counter()
    if boxes:
        edges = [sorted(set(chain(*slices))) for slices in zip(*(b for _, b in boxes), strict=True)]
        for cell in product(*map(pairwise, edges)):
            size = shared(cell, cell)
            owners = frozenset(owner for owner, box in boxes if shared(cell, box) == size)
            elements[owners] += size
        elements.pop(frozenset(), None)
    return elements


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


class Simulator:
    """Simulate strategies for one graph on one machine; what two strategies share is cut once."""

    def __init__(self, graph: "Graph", machine: Machine):
        check_loss(graph)
        self.graph, self.machine = graph, machine
        self.makers = {op.output: op for op in graph.ops}
        self.users: dict[str, list[tuple[Op, int]]] = defaultdict(list)
        self.touching: dict[str, list[tuple[Op, int]]] = defaultdict(list)  # place -1: it writes
        self.learns = {name: value.kind == "parameter" for name, value in graph.values.items()}
        for op in graph.ops:
            self.learns[op.output] = any(self.learns[name] for name in op.inputs)
            self.touching[op.output].append((op, -1))
            for place, name in enumerate(op.inputs):
                self.users[name].append((op, place))
                self.touching[name].append((op, place))
        self.check, self.seconds = cache(self._check), cache(self._seconds)
        self.moves, self.pieces = cache(self._moves), cache(self._pieces)

    def __call__(self, strategy: Strategy) -> TaskSimulation:
        """Return a strategy's times and bytes. ValueError: a cut is missing, or not the op's."""
        for output in self.makers:
            if output not in strategy:
                raise WrongInput(f"the strategy has no cut for {output}; give every op one")
            self.check(output, strategy[output])
        tasks, memory = TaskGraph(), [0] * self.machine.ranks
        forward = self._forward(tasks, strategy)
        backward = self._backward(tasks, strategy, forward)
        for name, value in self.graph.values.items():
            parameter, unused = value.kind == "parameter", not self.users[name]
            touching = (strategy[op.output] for op, _ in self.touching[name])
            for parts, size in self.pieces(name, *touching):
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
        seconds = max(end for _, end in tasks.times())
        return TaskSimulation(seconds, memory, sent, busy, tasks)

    def _check(self, output: str, cut: Cut) -> None:
        check(self.graph, self.makers[output], cut, self.machine.ranks)

    def _forward(self, tasks: TaskGraph, strategy: Strategy) -> dict[str, list[int]]:
        """Add the tasks of forward; return {output: the number of each part's task}."""
        numbers: dict[str, list[int]] = {}
        for op in self.graph.ops:
            cut = strategy[op.output]
            numbers[op.output] = here = self._parts(tasks, "F", op, cut, 1)
            for place, name in enumerate(op.inputs):
                if name in self.makers:
                    for i, j, size in self.moves(op.output, place, strategy[name], cut):
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
                    for i, j, size in self.moves(user.output, place, cut, strategy[user.output]):
                        self._send(tasks, numbers[user.output][j], here[i], size)
        return numbers

    def _parts(self, tasks: TaskGraph, kind: str, op: "Op", cut: Cut, times: int) -> list[int]:
        seconds = times * self.seconds(op.output, cut.degrees)
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

    def _seconds(self, output: str, degrees: Degrees) -> float:
        """Return the seconds of one part: the roofline of 2 FLOPs per product, else 1 each."""
        op, machine, values = self.makers[output], self.machine, self.graph.values
        n = self.graph.lengths(op)
        for letter, degree in degrees:
            n[letter] //= degree
        if op.kind in ("embedding", "take", "slice"):  # it reads the rows that it needs
            n |= dict.fromkeys(set(n) - set(op.terms[1]), 1)
        work = (2 if op.kind == "matmul" else 1) * math.prod(n.values()) / machine.flops
        touched = sum(
            values[name].itemsize * math.prod(n[letter] for letter in letters)
            for name, letters in op.operands
        )
        return machine.overhead + max(work, touched / machine.memory_bandwidth)

    def _moves(self, output: str, place: int, made: Cut, used: Cut) -> list[tuple[int, int, int]]:
        """Return (part that makes, part that uses, bytes that both have) of one input of an op."""
        op = self.makers[output]
        name = op.inputs[place]
        there = self._boxes(self.makers[name], -1, made)
        here = self._boxes(op, place, used)
        itemsize = self.graph.values[name].itemsize
        return [
            (i, j, itemsize * size)
            for (i, a), (j, b) in product(enumerate(there), enumerate(here))
            if (size := shared(a, b))
        ]

    def _pieces(self, name: str, *cuts: Cut) -> list[tuple[list, int]]:
        """Return ([(op, part), ...], bytes) per piece of a value: all that read or write it."""
        boxes = [
            ((op.output, part), box)
            for (op, place), cut in zip(self.touching[name], cuts, strict=True)
            for part, box in enumerate(self._boxes(op, place, cut))
        ]
        itemsize = self.graph.values[name].itemsize
        return [(sorted(parts), itemsize * size) for parts, size in pieces(boxes).items()]

    def _boxes(self, op: "Op", place: int, cut: Cut) -> list[Box]:
        """Return the box of an input that each part reads; place -1: of the output, writes."""
        name, letters = op.operands[place]
        boxes = cut.boxes(letters, self.graph.values[name].shape)
        if place == -1 or op.kind not in ("take", "slice"):
            return boxes
        first, last = (*op.options, op.options[0] + 1)[:2]  # of the axis that it takes from
        return [
            tuple((first, last) if x in op.whole else s for x, s in zip(letters, box, strict=True))
            for box in boxes
        ]


@dataclass(frozen=True, order=True)
class Score:
    """What a strategy costs: first bytes that the fullest rank lacks, then seconds."""

    lacking: float
    seconds: float


def flexflow(
    graph: "Graph",
    machine: Machine,
    seed: int = 0,
    budget: int = 1000,
    dims: str = "SOAP",
    sharpness: float = 50,
) -> tuple[Strategy, float]:
    """Return the best strategy found, {output of an op: its cut}, and its simulated seconds.

    budget      how many strategies all walks together may visit
    dims        which of S, O, A, P and R may be used
    sharpness   beta times the seconds of a walk's first strategy: at 50, one that takes 2 % of
                these longer is taken with probability 1/e

    The same seed returns the same strategy. ValueError if nothing was found that fits.
    """
    if budget < 3 or not 0 <= sharpness < math.inf:
        raise WrongInput(
            f"a budget of {budget} strategies and a sharpness of {sharpness} make no walks; "
            "use 3 strategies or more, and a sharpness from 0"
        )
    random, simulate = Random(seed), Simulator(graph, machine)
    options = cuts(graph, machine.ranks, dims)

    @cache
    def cost(*chosen: Cut) -> Score:
        simulated = simulate(dict(zip(options, chosen, strict=True)))
        return Score(max(0, max(simulated.memory) - machine.memory), simulated.seconds)

    one_rank = {name: possible[0] for name, possible in options.items()}
    starts = [one_rank, {name: random.choice(possible) for name, possible in options.items()}]
    if "S" in dims:
        starts.append(data_parallel(graph, machine.ranks))
    walks = (walk(start, options, cost, random, sharpness) for start in starts)
    least, best = min((best_of(one, budget // len(starts)) for one in walks), key=itemgetter(0))
    if least.lacking:
        raise WrongInput(
            f"none of {budget} strategies fits: the best lacks {least.lacking} bytes of the "
            f"{machine.memory} of a rank; use more ranks, or a larger budget"
        )
    return best, least.seconds


def walk(start: Strategy, options: dict, cost: Callable, random: Random, sharpness: float):
    """Yield (cost, strategy) of the start, and after every proposal of where the walk is then."""
    names, now, here = list(options), start, cost(*start.values())
    beta = sharpness / here.seconds if here.seconds else 0
    while True:
        yield here, now
        name = random.choice(names)
        proposed = {**now, name: random.choice(options[name])}
        there = cost(*proposed.values())
        if accepted(here, there, beta, random.random()):
            now, here = proposed, there


def accepted(here: Score, there: Score, beta: float, chance: float) -> bool:
    """Return whether to go there: if not worse, always; else with probability exp(-beta more)."""
    if here.lacking != there.lacking:
        return there.lacking < here.lacking
    return chance < math.exp(min(0, beta * (here.seconds - there.seconds)))


def best_of(steps: Iterator, budget: int) -> tuple[Score, Strategy]:
    """Return the best of `budget` steps; end when half as many in a row were not better."""
    least, best = next(steps)
    since = 0
    for here, now in islice(steps, budget - 1):
        since += 1
        if here < least:
            least, best, since = here, now, 0
        if 2 * since > budget:
            break
    return least, best
