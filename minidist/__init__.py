"""minidist: how distributed deep learning works, from scratch on NumPy and CuPy arrays.

Read first, in this order:

    autograd/tensor.py        a tensor records how it was computed; backward follows the record
    autograd/operators.py     + * @ and their like: an equation and its adjoint each
    nn/linear.py              a layer
    comm/collectives.py       what ranks do together: all_reduce round a ring, and others
    data_parallel/naive.py    a batch over ranks: one sum
    data_parallel/zero.py     the optimizer's state, gradients, weights over ranks
    pipeline_parallel/actions.py       what a rank of a pipeline can do, as a value
    pipeline_parallel/gpipe.py         an order of actions: fill, then drain
    pipeline_parallel/one_f_one_b.py   another: one forward, one backward
    pipeline_parallel/stage.py         a run of layers, and what is in flight through it
    pipeline_parallel/executor.py      runs any order
    parallel/collective_functions.py   collectives that backward passes through: f and g
    tensor_parallel/column_parallel.py a matrix over ranks by columns
    tensor_parallel/row_parallel.py    by rows
    comm/mesh.py              ranks as a mesh of axes
    hybrid.py                 data x pipeline x context x tensor on a mesh, experts within data
    training/loop.py          the training loop of all of them

Then, by subject:

    autograd/            differentiation; it knows no ranks
    nn/                  single-device Transformer, MLP and CNN; optim/, datasets/: how and what
                         they learn
    comm/                ranks, messages, collectives; it knows no gradients
    parallel/            what all axes share: the Trainer, collectives that backward passes through,
                         sums over copies and parts of a model, 16-bit weights
    data_parallel/       examples over ranks: buckets, servers, ZeRO, compression, local steps
    pipeline_parallel/   layers over ranks, and every schedule as a list of actions
    tensor_parallel/     matrices, channels and vocabularies over ranks
    context_parallel/    a sequence that no rank holds whole: ring_attention.py, ulysses.py
    expert_parallel/     experts on ranks, and rows that travel to them: dispatch.py
    checkpoint/          what a run needs to go on when a rank dies, on any other mesh
    training/            settings, kinds of data, servers, runs that outlive their ranks
    planning/            what a program will cost: simulator.py replays it on virtual clocks
    verify/              equivalence.py compares a strategy's gradient with one device's;
                         mistakes/: wrong implementations, which tests and grader must find
    observe/             timelines, traces, costs measured; bench/: beside other libraries;
                         pages/: pages of the site that run the package
    course/              labs and their grader
    cli/                 the commands

The foundation: backend.py (NumPy or CuPy, and which numbers), rng.py (numbers that depend on names
alone), events.py (who did what, when), errors.py (what goes wrong between ranks), pieces.py (how
things are cut).
"""

import sys
from collections.abc import Callable
from importlib import import_module

TYPE_CHECKING = False  # editors take it for true; importing it from `typing` would be slow

if TYPE_CHECKING:
    from minidist.autograd import Tensor, no_grad
    from minidist.comm import Cluster, Group, Mesh, run
    from minidist.nn import datasets, optim

__all__ = ["Cluster", "Group", "Mesh", "Tensor", "datasets", "no_grad", "optim", "run"]
__version__ = "0.1.0"


def on_first_use(
    package: str, module_of: dict[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that imports a name when it is first used.

    What needs no NumPy then loads none. The package's own modules are found, too.

    module_of  {name: the module of the package that defines it}
    """
    names = vars(sys.modules[package])

    def get(name: str) -> object:
        if name in module_of:
            home = import_module(f"{package}.{module_of[name]}")
            if not hasattr(home, name):
                import_module(f"{home.__name__}.{name}")  # a module of that package
            value = names[name] = getattr(home, name)
            return value
        try:
            if not name.startswith("_"):
                return import_module(f"{package}.{name}")  # a module of this package
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def show() -> list[str]:
        return sorted({*names, *module_of})

    return get, show


# The command line, and schedules, need no NumPy.
_MODULE_OF = {
    "Cluster": "comm",
    "Group": "comm",
    "Mesh": "comm",
    "Tensor": "autograd",
    "datasets": "nn",
    "no_grad": "autograd",
    "optim": "nn",
    "run": "comm",
}

__getattr__, __dir__ = on_first_use(__name__, _MODULE_OF)
