"""Recompute instead of remember: keep a segment's inputs, run its forward pass again when backward
arrives.

Chen et al., Training Deep Nets with Sublinear Memory Cost (2016), section 3: n layers in segments
of k keep n/k inputs plus the activations of one segment, for one more forward pass. The gradients
are the same bits.
"""

from minidist.autograd.tensor import Function, Tensor, no_grad, propagate, unbroadcast


def recompute(function, *inputs, parameters=None) -> Tensor:
    """Return function(*inputs), remembering only the inputs.

    function    a module, or any callable on tensors that gives the same result when it is called
                again
    inputs      tensors and other arguments
    parameters  the leaves it uses beside its inputs; default `function.parameters()`, or none if it
                has no such method
    """
    if parameters is None:
        parameters = function.parameters() if hasattr(function, "parameters") else []
    leaves = dict.fromkeys(p for p in parameters if p.requires_grad)  # each once, also if tied
    return Recompute(function, inputs)(*differentiable(inputs), *leaves)


def differentiable(arguments) -> list[Tensor]:
    """Return the tensors among the arguments that need a gradient, each once."""
    return list(dict.fromkeys(x for x in arguments if isinstance(x, Tensor) and x.requires_grad))


class Recompute(Function):
    """Y = f(X; W)  =>  run f once more on X with the memory on, then back-propagate through
    that.
    """

    def __init__(self, function, arguments):
        self.function, self.arguments = function, arguments

    def forward(self, *arrays):
        with no_grad():
            return self.function(*self.arguments).data

    def backward(self, grad):
        function, tensors = self.function, differentiable(self.arguments)
        fresh = {id(x): Tensor(x.data, requires_grad=True) for x in tensors}
        again = function(*[fresh.get(id(x), x) for x in self.arguments])
        parameters = self.inputs[len(tensors) :]
        contributions = {leaf: [] for leaf in [*fresh.values(), *parameters]}
        for leaf, contribution in propagate(again, grad, {}):
            if leaf not in contributions:
                raise ValueError(
                    f"recompute: the function used the parameter {leaf.name or leaf!r} without "
                    "being told; "
                    "pass it in parameters="
                )
            if contribution is not None:
                contributions[leaf].append(contribution)
        return tuple(_total(leaf.shape, terms) for leaf, terms in contributions.items())


def _total(shape, contributions):
    """One gradient out of the contributions to a leaf: None, the only one, or a thunk that adds
    them up in order.
    """
    if not contributions:
        return None
    if len(contributions) == 1:
        return contributions[0]

    def total(out=None):
        first, *others = [unbroadcast(c() if callable(c) else c, shape) for c in contributions]
        total = sum(others, start=first)
        if out is None:
            return total
        out[...] = total
        return out

    return total
