"""Data parallelism in buckets: gradients are reduced while backward still computes.

Li et al., PyTorch Distributed (VLDB 2020), section 3.2. Backward finishes the last layers first, so
buckets are filled in reverse order of registration; a second thread reduces the first bucket while
backward works on the layers before it. Three rules keep it correct:

    order     every rank launches the buckets in the same order, even if gradients come in another
    all       every bucket is launched once per step, even if a parameter got no gradient or the
              rank's shard is empty: the gradient is then zero
    last      several micro-batches add their gradients up first; only the last backward is reduced

Layouts, bytes and result are the same as in `naive.py`, to the bit: elements are added in rank
order, so the result does not depend on where buckets begin. Overlap pays where communication has
its own hardware; where ranks fill all cores, buckets only save messages.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from minidist.backend import Array
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.nn import Module, Parameter
from minidist.nn.flat_parameters import flat_slices
from minidist.parallel import check_balance, check_replicas, summed_ranks
from minidist.parallel.trainer import WholeBatches

PARTLY_SUMS = "its gradients are partly sums; call drop() of the Bucketed, and begin the step again"


def plan(parameters: list[Parameter], cap: int) -> list[list[Parameter]]:
    """Fill buckets in reverse order, each with at most `cap` bytes or with a single parameter.

    The first bucket is launched first; inside a bucket parameters keep their own order.
    """
    buckets: list[list[Parameter]] = []
    room = 0
    for p in reversed(parameters):
        if not buckets or p.data.nbytes > room:
            buckets.append([])
            room = cap
        buckets[-1].insert(0, p)
        room -= p.data.nbytes
    return buckets


class Bucketed:
    """Sum a model's gradients over the ranks of a group, bucket by bucket, during backward.

        reducer = Bucketed(model, group, cap=1 << 20)
        for x, y in micro_batches[:-1]:
            loss(x, y).backward()
        with reducer.reduce():                    # every rank, once per step, also with no batch
            loss(*micro_batches[-1]).backward()

    cap            bytes per bucket
    check_weights  whether the ranks first compare their weights (see check_same_weights)
    buckets        parameters, in order of launch; by default the plan for `cap`
    """

    def __init__(
        self,
        model: Module,
        group: Group,
        cap: int = 1 << 20,
        check_weights: bool = True,
        buckets: list[list[Parameter]] | None = None,
    ):
        if cap < 1:
            raise WrongInput(f"a bucket holds one byte or more, not {cap}")
        check_replicas(model, group, check_weights)
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.model, self.group = model, group.split(0)  # to run beside collectives of `group`
        self.buckets = plan(parameters, cap) if buckets is None else buckets
        self.bucket_of = {p: b for b, bucket in enumerate(self.buckets) for p in bucket}
        self.batches = WholeBatches(self.drop, PARTLY_SUMS)
        self.missing: list[int] | None = None  # gradients per bucket to come; None: not reducing
        self.orders = self.group.beside(self.all_reduce, "buckets")
        self.replaced: list[Array] = []  # gradients, whose memory must not be reused before `wait`
        for p in parameters:
            p.add_hook(self.ready)

    @contextmanager
    def reduce(self) -> Iterator[None]:
        """Reduce all gradients while the `with` block runs backward; at its end they are sums."""
        if self.missing is not None:
            raise WrongInput("this step is being reduced already; leave its `with` block first")
        with self.batches.batch():
            self.missing, self.launched = [len(bucket) for bucket in self.buckets], 0
            try:
                yield
                check_balance(self.model, self.group.size)
                self.launch_until(len(self.buckets))
            finally:
                self.missing = None
                self.orders.end()
        self.wait()

    def wait(self) -> None:
        """Wait for the sums that were begun; then no second thread adds any more."""
        self.orders.wait("the end of all buckets")
        self.replaced.clear()

    def drop(self) -> None:
        """Drop the gradients of a step that an error has ended."""
        self.wait()
        for p in self.bucket_of:
            p.grad = None
        self.batches.broken = False

    def ready(self, p: Parameter) -> None:
        """Note that a gradient is complete; launch the buckets whose turn it is."""
        if self.missing is None:
            return
        self.missing[self.bucket_of[p]] -= 1
        stop = self.launched
        while stop < len(self.buckets) and self.missing[stop] == 0:
            stop += 1
        self.launch_until(stop)

    def launch_until(self, stop: int) -> None:
        """Order the buckets before `stop` that are not launched yet."""
        for bucket in range(self.launched, stop):
            self.orders.put(bucket)
        self.launched = stop

    def all_reduce(self, bucket: int) -> None:
        """Sum one bucket's gradients, where they are in their flat vectors; in a second thread."""
        ranks = [summed_ranks(p, self.group) for p in self.buckets[bucket]]
        for p in self.buckets[bucket]:
            if p.grad is not p.grad_buffer:
                self.replaced.append(p.grad)
                p.grad_buffer[...] = 0 if p.grad is None else p.grad
                p.grad = p.grad_buffer
        for s in flat_slices(self.buckets[bucket]):
            self.group.all_reduce(s.gradient, out=s.gradient, label=f"bucket {bucket}")
        for p, over in zip(self.buckets[bucket], ranks, strict=True):
            p.summed_over = over
