"""A long run on many hosts that break, slow down, save, restart and wait, event by event.

All ranks stop when one host breaks, and go on from the last whole save:

    |=== interval ===|save|=== interval ===|save|=== lost ===X restart |=== interval ===|save| ...

Failures come at random, each host's at a constant rate, so that the next one of n hosts is n times
as near. If all hosts are alike, none is slow and none is missing, a useful second takes

    M exp(R/M) (exp((tau + delta)/M) - 1) / tau      (Daly 2006, of failures in restarts, too)

with M mean seconds between failures of any host, tau of an interval, delta of a save, R of a
restart. What is slow or missing has no closed form; here it is replayed. Standard library alone.

Is a slow host worth a restart? Slow times of random length have no memory: what is left of one is
`lasts` on average, always. So it is worth it at once or never: if lasts (1 - 1/pace) > R, with
pace = 1 + part (factor - 1). To wait first pays where short slow times and long ones are mixed.
"""

import heapq
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, fields
from math import exp, expm1, inf
from numbers import Integral
from random import Random

from minidist.errors import WrongInput, check_number

DAY = 24 * 3600.0
MOST = 10**7  # events of a replay: a few minutes


def _check(record, rule: str, holds: Callable[[float], bool], *names: str) -> None:
    for name in names:
        check_number(f"{name} is {rule}", getattr(record, name), holds)


@dataclass(frozen=True)
class Slowdown:
    """What makes a part of each step slower, now on one host, now on another.

    every   mean seconds between two beginnings on one host
    lasts   mean seconds until it ends
    factor  how many times as long that part of the step takes then
    part    the part of a step that it slows: 1 of a slow device, less of a slow link
    """

    every: float
    lasts: float
    factor: float
    part: float = 1.0

    def __post_init__(self):
        _check(self, "positive and finite", lambda x: 0 < x < inf, "every", "lasts")
        _check(self, "finite, from 1", lambda x: 1 <= x < inf, "factor")
        _check(self, "a share from 0 to 1", lambda x: 0 <= x <= 1, "part")


@dataclass(frozen=True)
class Run:
    """A run and its machines; all times in seconds.

    hosts       that a step of full speed needs
    spares      hosts that wait to take a broken one's place
    interval    of training at full speed between two saves
    save        that training waits for a save
    restart     from a failure until training goes on
    failures    mean time between failures of one host
    broken      share of the failures after which the host is out, for `repair` on average
    repair      mean time until a broken host is a spare
    elastic     the least number of hosts that go on without waiting: of n hosts a step of the same
                batch takes hosts/n as long. None: all are needed
    slowdowns   each step waits for the slowest host
    evict       seconds that a host may be slow: after the next save a spare takes its place, and
                it is under repair; a faster link, too, is taken then. inf: nobody is evicted
    links       for good, how many times as long each link takes, of hosts and spares; a restart
                takes the fastest, and each step waits for the slowest of them. (): all are alike
    linked      the part of a step that links take
    """

    hosts: int
    interval: float
    save: float
    restart: float
    failures: float
    spares: int = 0
    broken: float = 1.0
    repair: float = DAY
    elastic: int | None = None
    slowdowns: tuple[Slowdown, ...] = ()
    evict: float = inf
    links: tuple[float, ...] = ()
    linked: float = 0.0

    def __post_init__(self):
        least = self.hosts if self.elastic is None else self.elastic
        _check(self, "positive and finite", lambda x: 0 < x < inf, "interval", "failures", "repair")
        _check(self, "finite, from 0", lambda x: 0 <= x < inf, "save", "restart")
        _check(self, "a number from 0", lambda x: x >= 0, "evict")
        _check(self, "a share from 0 to 1", lambda x: 0 <= x <= 1, "broken", "linked")
        check_number("hosts is a whole number from 1", self.hosts, lambda x: x >= 1, Integral)
        check_number("spares is a whole number from 0", self.spares, lambda x: x >= 0, Integral)
        for link in self.links:
            check_number("links are finite, from 1", link, lambda x: 1 <= x < inf)
        if self.links and len(self.links) != (n := self.hosts + self.spares):
            raise WrongInput(f"links has {len(self.links)} numbers; give one of each of {n} hosts")
        rule = f"elastic is 1 to {self.hosts} hosts"
        check_number(rule, least, lambda x: 1 <= x <= self.hosts, Integral)


@dataclass
class Spent:
    """Where the seconds of a run went; they add up to all of it.

    useful    training that was saved, at full speed
    slow      what the same training took longer, with slow or missing hosts
    saves     saves that were finished
    lost      training and saving since the last save before a failure
    restarts  between a failure and the next step
    waiting   for a repair, with too few hosts
    evicted   how many hosts made place for a spare because they, or their links, were slow
    """

    useful: float = 0.0
    slow: float = 0.0
    saves: float = 0.0
    lost: float = 0.0
    restarts: float = 0.0
    waiting: float = 0.0
    failures: int = 0
    evicted: int = 0

    @property
    def seconds(self) -> float:
        return sum(getattr(self, f.name) for f in fields(self) if f.type is float)

    @property
    def goodput(self) -> float:
        """The share of the time that a run without failures would have needed."""
        return self.useful / self.seconds


def closed_form(run: Run) -> float:
    """Return the goodput of a run whose hosts are replaced at once and are never slow (Daly)."""
    M = run.failures / run.hosts
    try:
        cost = M * exp(run.restart / M) * expm1((run.interval + run.save) / M) / run.interval
    except OverflowError:  # an interval without a failure practically never comes
        return 0.0
    return 1 / cost


def replay(run: Run, seconds: float = 365 * DAY, seed: int = 0) -> Spent:
    """Return the seconds of a run by kind; a seed gives the same ones on any machine.

    ValueError after MOST events: there are too many in these seconds.
    """
    check_number("a run takes a finite number of seconds", seconds, lambda x: 0 < x < inf)
    return _Replay(run, Random(seed)).until(seconds)


class _Replay:
    """What the run does now, with which hosts, and what it has since its last save.

    doing    "train", "save", "restart" or "wait"; `left`: seconds of it, of training at full speed
    hosts    the links of those that take part, rising; `spares` more could
    repairs  when each broken host is back, and its link: a heap
    slow     of each slowdown: when it ends on each slow host, and when it began: a heap
    """

    def __init__(self, run: Run, random: Random):
        self.run, self.random = run, random
        links = sorted(run.links) or [1.0] * (run.hosts + run.spares)
        self.hosts, self.spares = links[: run.hosts], links[run.hosts :]
        self.repairs: list[tuple[float, float]] = []
        self.slow: list[list[tuple[float, float]]] = [[] for _ in run.slowdowns]
        self.doing, self.left = "train", run.interval
        self.trained = self.saving = 0.0
        self.spent = Spent()

    def until(self, end: float) -> Spent:
        now, count = 0.0, 0
        while now < end:
            if (count := count + 1) > MOST:
                raise WrongInput(f"{MOST:,} events took {now:g} of {end:g} s; take fewer seconds")
            then, event, which = min(self.events(now, end))
            self.pass_time(then - now)
            now = then
            match event:
                case "done":
                    self.done(now)
                case "failure":
                    self.failure(now)
                case "repaired":
                    insort(self.spares, heapq.heappop(self.repairs)[1])
                    if self.doing == "wait":
                        self.restart()
                case "slow":
                    lasts = self.random.expovariate(1 / self.run.slowdowns[which].lasts)
                    heapq.heappush(self.slow[which], (now + lasts, now))
                case "fast again":
                    heapq.heappop(self.slow[which])
        self.keep(self.run.interval - (self.left if self.doing == "train" else 0))
        return self.spent

    def events(self, now: float, end: float):
        """Yield (when, what, which slowdown) of all that may be next.

        What comes at a constant rate has no memory: it is drawn anew after every event.
        """
        yield end, "end", 0
        yield now + self.left * self.pace, "done", 0
        if self.hosts:
            yield now + self.random.expovariate(len(self.hosts) / self.run.failures), "failure", 0
        if self.repairs:
            yield self.repairs[0][0], "repaired", 0
        for which, (slowdown, ends) in enumerate(zip(self.run.slowdowns, self.slow, strict=True)):
            if fast := len(self.hosts) - len(ends):
                yield now + self.random.expovariate(fast / slowdown.every), "slow", which
            if ends:
                yield ends[0][0], "fast again", which

    @property
    def pace(self) -> float:
        """Seconds per second of full speed: all wait for the slowest host of each kind."""
        if self.doing != "train":
            return 1.0
        kinds = zip(self.run.slowdowns, self.slow, strict=True)
        slowed = sum(slowdown.part * (slowdown.factor - 1) for slowdown, ends in kinds if ends)
        slowed += self.run.linked * (self.hosts[-1] - 1)
        return self.run.hosts / len(self.hosts) * (1 + slowed)

    def pass_time(self, seconds: float) -> None:
        self.left -= seconds / self.pace
        if self.doing == "train":
            self.trained += seconds
        elif self.doing == "save":
            self.saving += seconds
        elif self.doing == "restart":
            self.spent.restarts += seconds
        else:
            self.spent.waiting += seconds

    def done(self, now: float) -> None:
        was, run = self.doing, self.run
        self.doing, self.left = ("save", run.save) if was == "train" else ("train", run.interval)
        if was == "save":
            self.keep(run.interval)
            self.evict(now)

    def evict(self, now: float) -> None:
        """Let spares take the place of hosts that are slow for too long, or have slower links."""
        before = now - self.run.evict
        late = [(i, host) for i, ends in enumerate(self.slow) for host in ends if host[1] <= before]
        for i, host in late[: len(self.spares)]:
            if host in self.slow[i]:  # else it was slow for two reasons, and is out
                self.slow[i].remove(host)
                self.leave(now, i)
                self.spent.evicted += 1
        if self.spares and (late or (self.run.evict < inf and self.spares[0] < self.hosts[-1])):
            self.restart()

    def failure(self, now: float) -> None:
        """Lose what was not saved; a spare, if there is one, replaces a broken host."""
        self.spent.failures += 1
        self.spent.lost += self.trained + self.saving
        self.trained = self.saving = 0.0
        if self.random.random() < self.run.broken:
            self.leave(now)
        self.restart()

    def leave(self, now: float, known: int | None = None) -> None:
        """Repair a host; it may have been slow, for other reasons than a `known` slowdown."""
        for i, ends in enumerate(self.slow):
            if i != known and self.random.random() * len(self.hosts) < len(ends):
                ends.remove(self.random.choice(ends))
            heapq.heapify(ends)
        link = self.hosts.pop(self.random.randrange(len(self.hosts)) if self.run.links else -1)
        back = now + self.random.expovariate(1 / self.run.repair)
        heapq.heappush(self.repairs, (back, link))

    def restart(self) -> None:
        """Take the fastest links there are; begin again or, with too few hosts, wait for one."""
        most = self.run.hosts
        while self.spares and (len(self.hosts) < most or self.spares[0] < self.hosts[-1]):
            if len(self.hosts) == most:
                insort(self.spares, self.hosts.pop())
                self.spent.evicted += 1
            insort(self.hosts, self.spares.pop(0))
        enough = len(self.hosts) >= (self.run.elastic or most)
        self.doing, self.left = ("restart", self.run.restart) if enough else ("wait", inf)

    def keep(self, progress: float) -> None:
        """Count what the run has since its last save: `progress` seconds at full speed."""
        if self.trained:
            self.spent.useful += progress
            self.spent.slow += self.trained - progress
        self.spent.saves += self.saving
        self.trained = self.saving = 0.0
