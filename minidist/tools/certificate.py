"""The certificate of a training run: the ranks' gradients equal one device's on what it trained."""

import copy

from minidist import nn
from minidist.datasets import Digits, Text
from minidist.rng import generator
from minidist.tools import equivalence, strategies
from minidist.train import Settings, examples


def certify(
    model: nn.Sequential,
    text: Text | Digits,
    settings: Settings,
    transport: str = "process",
    device: str = "cpu",
) -> dict:
    """Compare the gradients of the ranks, on this device, with those of one host, in float64.

    The batch has 2 windows, or images, per rank and one more, so the shards are uneven.
    """
    ranks = settings.ranks
    inputs, targets = examples(text, settings)
    kind = "windows"
    if isinstance(text, Digits):
        kind, inputs = "images", inputs.astype("float64")
    rows = generator(0, "certificate").permutation(len(inputs))[: 2 * ranks + 1]
    name = f"all {len(model.parameters())} parameters, {len(rows)} {kind}"
    model = copy.deepcopy(model).astype("float64")
    strategy, options = "sync_batch_norm" if isinstance(text, Digits) else "naive", {}
    if settings.on_mesh:
        strategy, asked = "hybrid", "dp pp cp tp ep zero schedule micro_batches".split()
        options = {key: getattr(settings, key) for key in asked}
    case = strategies.Case(name, model, inputs[rows], targets[rows], options=options)
    return equivalence.check(strategy, case, ranks, transport=transport, device=device)
