"""A stage, GPipe's cell (Huang et al. 2019, section 2.1): a run of layers, and what is in flight.

    X[B/m, ...] -> [ layers k to l of the model ] -> Y[B/m, ...]      what crosses the boundaries
    dX          <- [            backward        ] <- dY               is one micro-batch's

Between F and B of micro-batch i the stage keeps X (a leaf) and the graph from X to Y, but not Y
once it is sent. Between I and W it keeps what the weights' gradients need. Y of the last stage is
the loss, divided by the number of targets of the whole batch; so the gradients of micro-batches,
however uneven, only have to be summed.
"""

from collections.abc import Callable

from minidist import nn
from minidist.autograd import Tensor, deferred, losses, recompute
from minidist.autograd.recording import is_recording
from minidist.backend import Array
from minidist.errors import WrongInput
from minidist.nn.datasets import Batch


class Stage:
    """Layers of a model, run for one micro-batch after the other.

    first, last  whether the stage takes the batch's inputs, and whether it ends in the loss
    loss         (outputs, targets, reduction_size=) -> a scalar tensor
    recompute    keep only X, and run the layers again in backward
    peak         the most micro-batches that have been in flight at once
    losses       {micro-batch: its part of the loss}, on the last stage
    """

    def __init__(
        self,
        layers: list[nn.Module],
        first: bool,
        last: bool,
        loss: Callable = nn.cross_entropy,
        recompute: bool = False,
    ):
        self.layers, self.first, self.last = list(layers), first, last
        self.loss, self.recompute, self.peak = loss, recompute, 0
        self.begin([])

    def begin(self, batch: list[Batch]) -> None:
        """Forget what was in flight; take new micro-batches, which actions name by number."""
        self.batch = batch
        self.received: dict[int, Array] = {}  # X, from the stage before
        self.output_gradients: dict[int, Array] = {}  # dY, from the stage behind
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.deferred: dict[int, list] = {}
        self.losses: dict[int, float] = {}

    def parameters(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(p for layer in self.layers for p in layer.parameters()))

    def forward(self, i: int) -> None:
        """Y = layers(X); on the last stage, the loss."""
        micro_batch = self.batch[i]
        x = micro_batch.inputs if self.first else Tensor(self.received.pop(i), requires_grad=True)
        if self.recompute:
            y = recompute(self._run, x, micro_batch, parameters=self.parameters())
        else:
            y = self._run(x, micro_batch)
        self.outputs[i] = y
        if self.last:
            self.losses[i] = y.item()
        if not is_recording():
            return
        self.inputs[i] = x
        self.peak = max(self.peak, len(self.inputs.keys() | self.deferred.keys()))

    def _run(self, x: Tensor | Array, micro_batch: Batch) -> Tensor:
        y = x if isinstance(x, Tensor) or x.dtype.kind in "iu" else Tensor(x)
        for layer in self.layers:
            y = layer(y, micro_batch)
        if not isinstance(y, Tensor):
            raise WrongInput("no gradient passes a stage of tokens alone; give it the embedding")
        if self.last:
            y = self.loss(y, micro_batch.targets, reduction_size=micro_batch.total)
            y = losses.scaled(y, micro_batch.loss_scale)
        return y

    def output(self, i: int) -> Array:
        """Return Y, to be sent to the next stage; from now on the stage keeps only its shape."""
        y = self.outputs[i]
        sent = y.data
        if y.creator is not None:  # else it may be the batch's own input
            y.data = y.xp.broadcast_to(y.xp.zeros((), sent.dtype), y.shape)
        return sent

    def backward(self, i: int) -> None:
        """Compute dX; add dW to the parameters' gradients."""
        self._backward(i, None)

    def backward_input(self, i: int) -> None:
        """Compute dX alone; defer what only dW needs.

        A function of X itself, such as a slice, may defer its part of dX: that part is computed.
        """
        x = self.inputs[i]
        later: list[deferred.Deferred] = []
        self._backward(i, later)
        for contribution in later:
            if contribution.leaf is x:
                contribution()
        self.deferred[i] = [contribution for contribution in later if contribution.leaf is not x]

    def _backward(self, i: int, later: list | None) -> None:
        y, dy = self.outputs.pop(i), self.output_gradients.pop(i, None)
        if y.requires_grad:  # else everything so far is frozen
            y.backward(dy, deferred=later)
        if self.first:
            del self.inputs[i]

    def input_gradient(self, i: int) -> Array:
        """Return dX, to be sent to the stage before, and forget it."""
        x = self.inputs.pop(i)
        return x.xp.zeros_like(x.data) if x.grad is None else x.grad  # Y may not depend on X

    def update(self, i: int) -> None:
        """Update the weights, if the stage has an optimizer (see weight_stashing.py)."""
        raise WrongInput("this stage has no optimizer: programs with an update are for PipeDream")

    def backward_weights(self, micro_batches: list[int]) -> None:
        """Compute what was deferred for these micro-batches, one product per weight."""
        deferred.compute(later for i in micro_batches for later in self.deferred.pop(i))
