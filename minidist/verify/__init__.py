"""Is it right?  Every strategy's gradients and bytes, against one device and what papers print.

equivalence.py   certify(...): a strategy, a function, a worker or a class; one row for each
                 outcomes.py has what runs on a rank and what it leaves there
strategies/      a record of each strategy: its cases, its promise, its costs; and the replays that
                 an asynchronous or compressed training must equal, repeated by one rank
foreign.py       against(...): somebody else's gradients of the same model
                 variants.py has what other programs compute otherwise
compare.py       the bound
certificate.py   the gradients of a training run, certified
causes/          why a wrong gradient is wrong: the parameter, the rank, the ratio, the mistake
watch.py         what a rank computes and holds in a step, for the table of costs

How is `naive` proved?  strategies/axes.py has its record; `check` in equivalence.py runs
it on all ranks, and compare.py compares. The rest is for failures.
"""

from minidist import on_first_use

TYPE_CHECKING = False

if TYPE_CHECKING:
    from minidist.verify.equivalence import certify
    from minidist.verify.foreign import against

__all__ = ["against", "certify"]
__getattr__, __dir__ = on_first_use(__name__, {"against": "foreign", "certify": "equivalence"})
