"""minidist: how distributed deep learning works, from scratch on NumPy and CuPy arrays.

Reading order:

    autograd/        a tensor remembers how it was computed; it knows no ranks
    nn/, optim.py    a single-device Transformer and MLP, and their optimizers
    comm/            ranks, messages, collectives; it knows no gradients
    data_parallel/   naive.py: the first strategy, one line away from the single device
    tools/           equivalence.py: the proof that a strategy leaves the gradient that one device
                     would have computed
    train.py         the training loop of `minidist train`
"""

from minidist.autograd import Tensor, no_grad
from minidist.comm import Cluster, Group, Mesh, run

__all__ = ["Cluster", "Group", "Mesh", "Tensor", "no_grad", "run"]
__version__ = "0.1.0"
