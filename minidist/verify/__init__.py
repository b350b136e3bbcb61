"""Is it right?  Every strategy's gradients and bytes, against one device and closed forms.

strategies/      a record of each strategy: its worker, its cases, its promise, its costs
yours.py         certify(...): a strategy, a worker or a class of the reader's
                 two_batches.py runs it on a rank, and judges what all ranks then have
foreign.py       against(...): somebody else's gradients of the same model
                 foreign_ranks.py has what its ranks have, variants.py what programs differ in
equivalence.py   runs a record on real ranks and compares; compare.py has the bound
certificate.py   the gradients of a training run, certified
replays/         what an asynchronous or compressed training must equal, repeated by one rank
causes/          why a wrong gradient is wrong: the parameter, the rank, the ratio, the mistake
watch.py         what a rank computes and holds in a step, for the table of costs

How is `naive` proved?  strategies/data_parallel.py has its worker, which runs a batch on a rank;
`check` in equivalence.py runs it on all ranks, and compare.py compares. The rest is for failures.
"""

from minidist.first_use import on_first_use

TYPE_CHECKING = False

if TYPE_CHECKING:
    from minidist.verify.equivalence import certify
    from minidist.verify.foreign import against

__all__ = ["against", "certify"]
__getattr__, __dir__ = on_first_use(__name__, {"against": "foreign", "certify": "equivalence"})
