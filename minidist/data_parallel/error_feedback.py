"""What error feedback remembers from one step to the next, whatever happens to the step.

unscaled    MixedPrecision multiplies gradients by a scale that changes; what is remembered is
            divided by it
skipped     a step whose sums are not finite, or that MixedPrecision skips because any rank's
            are not, leaves everything as it was
loaded      weights that load_state has replaced are owed nothing: all is forgotten
"""

from collections.abc import Iterable

from minidist.autograd.recording import Since
from minidist.backend import Array, array_module
from minidist.comm import Group
from minidist.nn import Module
from minidist.nn.parameter import Scale
from minidist.replicas import check_same_weights


class Memory:
    """Arrays by name that a step replaces and never writes into, and the number of steps.

    kept        dictionaries, which others read and write; here they are only taken back or emptied
    steps       number of steps so far that were not skipped, since the weights were loaded
    before      steps and dictionaries before the last step, while it may still be skipped
    last_scale  the LossScale of the last step, or None; the step was skipped if this now counts
                more skipped steps than `skipped`
    """

    def __init__(self, model: Module, group: Group, *kept: dict[str, Array]):
        self.model, self.group = model, group
        self.kept: tuple[dict[str, Array], ...] = kept
        self.parameters = model.parameters()
        self.steps, self.skipped, self.ended = 0, 0, True
        self.weights = Since(self.last_loaded)
        self.before: tuple[int, list[dict]] | None = None
        self.last_scale: Scale | None = None

    @property
    def scale(self) -> Scale | None:
        """The LossScale of the gradients, if MixedPrecision updates the parameters, or None."""
        return next((p.home.scale for p in self.parameters if p.home and p.home.scale), None)

    def begin(self) -> float:
        """Begin a step from what is right to remember; return what multiplies its gradients."""
        if not self.ended:
            self.undo()
        self.follow()
        self.settle()
        self.ended = False
        self.before = self.steps, [dict(memory) for memory in self.kept]
        self.last_scale = scale = self.scale
        self.skipped = 0 if scale is None else scale.skipped
        return 1.0 if scale is None else scale.value

    def end(self, sums: Iterable[Array]) -> None:
        """End a step with these sums of gradients, the same on every rank."""
        self.steps, self.ended = self.steps + 1, True
        if not all(bool(array_module(x).isfinite(x).all()) for x in sums):
            self.undo()
        elif self.last_scale is None:
            self.before = None

    def last_loaded(self) -> int:
        return max((p.loaded for p in self.parameters), default=0)

    def settle(self) -> None:
        """Take the last step back if it was skipped."""
        scale = self.last_scale
        if self.before is not None and scale and scale.skipped > self.skipped:
            self.undo()

    def undo(self) -> None:
        """Remember what was remembered before the last step."""
        assert self.before is not None
        (self.steps, before), self.before = self.before, None
        for memory, old in zip(self.kept, before, strict=True):
            memory.clear()
            memory.update(old)

    def follow(self) -> None:
        """Forget all if the weights were loaded since; ValueError unless all ranks loaded them."""
        if self.weights.behind():
            check_same_weights(self.model, self.group)
            self.weights.follow()
            self.steps, self.before = 0, None
            for memory in self.kept:
                memory.clear()
