"""Replay ranks that share the cores of one machine: who works, who waits, and how long it takes.

    3 ranks, 2 cores     rank 0  ====work====|wait..........        3 work: each at 2/3 of the speed
                         rank 1  ====work====|wait..........
                         rank 2  ====work====|====work====          1 works: at full speed

A rank's program is a list of steps. `Work` takes seconds of a core. While k ranks work on c cores,
each of them goes on at the speed min(1, c / k), as under a fair scheduler (processor sharing). A
rank that waits takes no core. Where there are as many cores as ranks, nobody slows anybody down,
and the ends are as `simulator.simulate` finds them.
"""

from collections import Counter, deque
from dataclasses import dataclass
from fractions import Fraction

from minidist.planning.replay import divided

Seconds = int | float | Fraction


@dataclass(frozen=True)
class Work:
    """Compute for this many seconds of one core."""

    seconds: Seconds


@dataclass(frozen=True)
class Send:
    """Put a message into a lane; it can be received `delay` seconds later. Waits for nobody."""

    lane: tuple
    delay: Seconds = 0


@dataclass(frozen=True)
class Receive:
    """Wait for the next message of a lane."""

    lane: tuple


@dataclass(frozen=True)
class Meet:
    """Wait until all these ranks are at their meeting of this group."""

    ranks: tuple[int, ...]
    group: tuple = ()


Step = Work | Send | Receive | Meet


def ends(programs: list[list[Step]], cores: Seconds) -> list[Seconds]:
    """Return when each rank has done its program, all begun at 0; ValueError if some never do.

    cores  how many the ranks have together; a fraction, if other programs take the rest. All
           arithmetic is +, -, *, / and comparison: Fractions stay exact.
    """
    if not cores > 0:
        raise ValueError(f"ranks share more than 0 cores, not {cores}")
    return _Replay(programs, cores).run()


class _Replay:
    def __init__(self, programs: list[list[Step]], cores: Seconds):
        self.programs, self.cores = [list(p) for p in programs], cores
        self.now: Seconds = 0
        self.at = [0] * len(programs)  # the number of each rank's next step
        self.left: dict[int, Seconds] = {}  # seconds of a core, of the ranks that work
        self.arrivals: dict[tuple, deque] = {}  # of a lane: when its messages can be received
        self.met: Counter = Counter()  # meetings per group and rank
        self.ends: list[Seconds | None] = [None] * len(programs)

    def run(self) -> list[Seconds]:
        while any(end is None for end in self.ends):
            while sum(self._go_on(r) for r in range(len(self.ends)) if r not in self.left):
                pass
            self._pass_time()
        return [end for end in self.ends if end is not None]

    def _go_on(self, r: int) -> bool:
        """Take a rank's next step if it can; return whether others may now go on, too."""
        if self.ends[r] is not None:
            return False
        if self.at[r] == len(self.programs[r]):
            self.ends[r] = self.now
            return False
        step = self.programs[r][self.at[r]]
        match step:
            case Work(seconds):
                self.left[r] = seconds
                if seconds > 0:
                    return False
                del self.left[r]
            case Send(lane, delay):
                self.arrivals.setdefault(lane, deque()).append(self.now + delay)
            case Receive(lane):
                waiting = self.arrivals.get(lane)
                if not waiting or waiting[0] > self.now:
                    return False
                waiting.popleft()
            case Meet(ranks, group):
                if not self._all_there(r, ranks, group):
                    return False
        self.at[r] += 1
        return True

    def _all_there(self, r: int, ranks: tuple[int, ...], group: tuple) -> bool:
        """Return whether all ranks have come to the meeting at which r is; count that r has."""
        key = group, ranks
        number = self.met[key, r]
        if self.met[key, r, "here"] == number:
            self.met[key, r, "here"] += 1
        if any(self.met[key, q, "here"] <= number for q in ranks):
            return False
        self.met[key, r] += 1
        return True

    def _pass_time(self) -> None:
        """Move to the next moment at which a rank has done its work, or a message can be had."""
        slow = max(1, divided(len(self.left), self.cores))  # seconds for a second of a core
        waits = [d[0] - self.now for d in self.arrivals.values() if d and d[0] > self.now]
        waits += [seconds * slow for seconds in self.left.values()]
        open_ranks = [r for r, end in enumerate(self.ends) if end is None]
        if not waits and open_ranks:
            r = open_ranks[0]
            raise ValueError(
                f"rank {r} waits forever at step {self.at[r]}, {self.programs[r][self.at[r]]}; "
                "give every Receive its Send, and every rank of a Meet the same Meet"
            )
        passed = min(waits, default=0)
        self.now += passed
        for r, seconds in list(self.left.items()):
            if seconds * slow <= passed:
                del self.left[r]
                self.at[r] += 1
            else:
                self.left[r] = seconds - divided(passed, slow)
