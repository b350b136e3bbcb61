"""The certificate of a training run: the ranks' gradients equal one device's on what it trained."""

import copy

from minidist import nn
from minidist.datasets import Text
from minidist.rng import generator
from minidist.tools import equivalence, strategies
from minidist.train import Settings


def certify(
    model: nn.Transformer,
    text: Text,
    settings: Settings,
    transport: str = "process",
    device: str = "cpu",
) -> dict:
    """Compare the gradients of the ranks, on this device, with those of one host, in float64.

    The batch has 2 windows per rank and one more, so the shards are uneven.
    """
    ranks = settings.ranks
    inputs, targets = text.windows(model.context)
    rows = generator(0, "certificate").permutation(len(inputs))[: 2 * ranks + 1]
    name = f"all {len(model.parameters())} parameters, {len(rows)} windows"
    model = copy.deepcopy(model).astype("float64")
    strategy, options = "naive", {}
    if settings.pp > 1 or settings.tp > 1:
        strategy, asked = "hybrid", ("dp", "pp", "tp", "schedule", "micro_batches")
        options = {key: getattr(settings, key) for key in asked}
    case = strategies.Case(name, model, inputs[rows], targets[rows], options=options)
    return equivalence.check(strategy, case, ranks, transport=transport, device=device)
