"""minidist: how distributed deep learning works, from scratch on NumPy and CuPy arrays.

Reading order:

    autograd/            a tensor remembers how it was computed; it knows no ranks
    nn/, optim.py        single-device Transformer, MLP and CNN, and their optimizers
    comm/                ranks, messages, collectives; it knows no gradients
    replicas.py          what ranks with copies or parts of a model sum, measure and compare
    data_parallel/       the first strategy: naive.py, then bucketed.py
    pipeline_parallel/   layers on ranks, and every schedule as a list of actions
    collective_functions.py   collectives that backward passes through: f, g and their like
    tensor_parallel/     matrices split over ranks: column_parallel.py, row_parallel.py first
    context_parallel/    a sequence that no rank holds whole: ring_attention.py, ulysses.py
    expert_parallel/     experts on ranks, and rows that travel to them: dispatch.py
    hybrid.py            data x pipeline x context x tensor on a mesh, experts within data
    mixed_precision.py   16-bit weights with float32 copies; loss scaling
    checkpoint/          what a run needs to go on when a rank dies, on any other mesh
    planning/            what a program will cost: simulator.py replays it on virtual clocks
    tools/               observers; equivalence.py compares a strategy's gradient with one device's
    train.py             the training loop of `minidist train`; kinds.py: what it can learn;
                         presets.py: its meshes by name; train_with_servers.py: asynchronously
    sampling.py          text from a trained model; decoding.py, translating.py: translations
    elastic.py           training that goes on without the ranks that die
    course/              labs, their grader, and wrong implementations that the tests must kill

The foundation: backend.py (NumPy or CuPy), rng.py (numbers that depend on names alone),
events.py (who did what, when), errors.py (what goes wrong between ranks), datasets/ (what is
learnt, and how it is dealt), tokens.py, first_use.py (names imported late).
"""

from minidist.first_use import on_first_use

TYPE_CHECKING = False  # editors take it for true; importing it from `typing` would be slow

if TYPE_CHECKING:
    from minidist.autograd import Tensor, no_grad
    from minidist.comm import Cluster, Group, Mesh, run

__all__ = ["Cluster", "Group", "Mesh", "Tensor", "no_grad", "run"]
__version__ = "0.1.0"

# Each name is imported when it is first used: the command line, and schedules, need no NumPy.
_MODULE_OF = {
    "Cluster": "comm",
    "Group": "comm",
    "Mesh": "comm",
    "Tensor": "autograd",
    "no_grad": "autograd",
    "run": "comm",
}

__getattr__, __dir__ = on_first_use(__name__, _MODULE_OF)
