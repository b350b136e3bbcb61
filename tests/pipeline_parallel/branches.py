"""How the tests of branch placement run a case."""

from minidist.verify.compare import compare
from minidist.verify.equivalence import worker_of
from minidist.verify.strategies import STRATEGIES, one_device

siamese_worker = worker_of(STRATEGIES["siamese"])


def judge(ranks, case, worker=siamese_worker, bound=1e-9, **options):
    """Run a case on ranks; return the comparison with one device, and the bytes moved."""
    outcomes = ranks.run(lambda group: worker(group, case, **options))
    comparison = compare([o.gradients for o in outcomes], one_device(case), bound)
    return comparison, sum(outcome.bytes for outcome in outcomes)
