"""The certificate of a training run: the ranks' gradients equal one device's on what it trained."""

import copy

from minidist import nn
from minidist.rng import generator
from minidist.training.kinds import DIGITS, Data, kind_of
from minidist.training.settings import Settings
from minidist.verify import equivalence, strategies


def certify(
    model: nn.Module,
    data: Data,
    settings: Settings,
    transport: str = "process",
    device: str = "cpu",
    servers: int = 0,
) -> dict:
    """Compare the gradients of the ranks, on this device, with those of one host, in float64.

    The batch has 2 windows, images or pairs per rank and one more, so the shards are uneven.

    servers  ranks that are synchronous servers; 0: all ranks sum their gradients
    """
    ranks = settings.ranks
    kind = kind_of(data)
    inputs, targets = kind.examples(data, settings)
    rows = generator(0, "certificate").permutation(len(inputs))[: 2 * ranks + 1]
    name = f"all {len(model.parameters())} parameters, {len(rows)} {kind.unit}"
    model = copy.deepcopy(model).astype("float64")
    strategy, options = "sync_batch_norm" if kind is DIGITS else "naive", {}
    if servers:
        strategy, options = "parameter_server", {"servers": servers}
    elif settings.on_mesh:
        strategy, asked = "hybrid", "dp pp cp tp ep zero schedule micro_batches".split()
        options = {key: getattr(settings, key) for key in asked}
    inputs = inputs[rows].astype("float64") if inputs.dtype.kind == "f" else inputs[rows]
    case = strategies.Case(name, model, inputs, targets[rows], model.loss, options=options)
    return equivalence.check(strategy, case, ranks, transport=transport, device=device)
