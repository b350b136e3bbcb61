"""The sums of stages' gradients over ranks, each begun inside the pipeline, at its R.

A stage's gradients are complete when the backward of its last micro-batch has ended. With several
chunks per rank the sum of one runs beside the backward of the others:

    p = 1, m = 2, v = 2     this thread      F0 F1 f0 f1 b0 b1 B0 B1 R----
    lower case: chunk 1     second thread                      r----

Without R both sums would come after B1. Breadth-first schedules (Lamy-Poirier 2023), in which the
chunks end one after the other, gain the most. A rank's last R has nothing to run beside, so its sum
needs no second thread; with one chunk per rank it is the only one, and nothing is gained.

A parameter that stages of several ranks share (a tied embedding) is summed over the stages first,
when all of them have ended. So its layer waits for the end of the program, too.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from minidist.backend import Array
from minidist.comm import Group
from minidist.nn import Module, Parameter
from minidist.pipeline_parallel.actions import Action, Reduce
from minidist.pipeline_parallel.executor import Sums
from minidist.pipeline_parallel.stage import Stage


class OverlappedSums(Sums):
    """The sums of one rank's stages over ranks.

    work    (layers) -> None: sums their gradients over the ranks that have copies of them, in
            groups that the first thread does not use meanwhile
    shared  parameters that stages of other ranks have, too
    ready   {stage: the layers that are complete at its R, for the second thread}
    left    the layers for the end of the program
    """

    def __init__(
        self,
        program: list[Action],
        stages: list[Stage],
        shared: set[Parameter],
        group: Group,
        work: Callable[[list[Module]], None],
    ):
        self.stages, self.group, self.work = stages, group, work
        order = [stages[a.chunk] for a in program if isinstance(a, Reduce)]
        self.ready, self.left = complete_at(order, shared)
        self.last = order[-1]
        self.orders = group.beside(self.sum, "sums")
        self.used: list[Array | None] = []  # gradients: see Beside

    def begin(self, stage: Stage) -> None:
        """Let the second thread sum what is complete; called at the stage's R."""
        if not self.ready[stage]:
            return
        self.used += [p.grad for layer in self.ready[stage] for p in layer.home.parameters]
        self.orders.put(stage)

    @contextmanager
    def within(self) -> Iterator[None]:
        """At the end of the `with` block, wait for the sums that each R in it has begun."""
        try:
            yield
        finally:
            self.orders.end()
        self.orders.wait("the end of all sums")
        self.used.clear()

    def sum(self, stage: Stage) -> None:
        """Sum what is complete; in the second thread."""
        with self.logged(stage):
            self.work(self.ready[stage])

    def finish(self) -> None:
        """Sum what is left; called after the program."""
        with self.logged(self.last):
            self.work(self.left)

    def logged(self, stage: Stage) -> AbstractContextManager[None]:
        """Return a context that logs the sum of a stage like its action."""
        name, log = str(Reduce(self.stages.index(stage))), self.group.log
        return nullcontext() if log is None else log.span(name, "communication")


def complete_at(
    order: list[Stage], shared: set[Parameter]
) -> tuple[dict[Stage, list[Module]], list[Module]]:
    """Return {stage: the layers that are complete at its R}, and those for the end of the program.

    A layer is complete when all stages that use one of its parameters have come to their R.

    order  the stages in the order of their R
    """
    at = {p: when for when, stage in enumerate(order) for p in stage.parameters()}
    ready: dict[Stage, list[Module]] = {stage: [] for stage in order}
    left: list[Module] = []
    for layer in (layer for stage in order for layer in stage.layers):
        if own := layer.home.parameters:
            when = max(at[p] for p in own)
            waits = when == len(order) - 1 or shared & set(own)
            (left if waits else ready[order[when]]).append(layer)
    return ready, left
