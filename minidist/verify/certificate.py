"""The certificate of a training run: its trainer's gradients equal one device's."""

import copy
from dataclasses import replace

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.backend import to_host
from minidist.comm import Group, run
from minidist.rng import generator
from minidist.training.kinds import Data, kind_of
from minidist.training.settings import Settings
from minidist.training.setup import trainer_for
from minidist.verify.compare import compare
from minidist.verify.strategies.cases import INPUT, Case, as_input, moved_by_forward, one_device


def certify(
    model: nn.Module,
    data: Data,
    settings: Settings,
    transport: str = "process",
    device: str = "cpu",
) -> dict:
    """Compare the gradients of the ranks, on this device, with those of one host, in float64.

    The batch has 2 windows, images or pairs per rank and one more, so the shards are uneven.
    Servers are synchronous here.
    """
    ranks, kind = settings.ranks, kind_of(data)
    inputs, targets = kind.examples(data, settings)
    rows = generator(0, "certificate").permutation(len(inputs))[: 2 * ranks + 1]
    name = f"all {len(model.parameters())} parameters, {len(rows)} {kind.unit}"
    model = copy.deepcopy(model).astype("float64")
    inputs = inputs[rows].astype("float64") if inputs.dtype.kind == "f" else inputs[rows]
    case = Case(name, model, inputs, targets[rows])
    if settings.servers:
        from minidist.verify.equivalence import check  # here: no other run needs it

        case = replace(case, options={"servers": settings.servers})
        return check("parameter_server", case, ranks, transport=transport, device=device)
    whole = replace(settings, precision="float32")  # the trainer keeps the model's float64
    got = run(gradients, ranks, case, whole, transport=transport, device=device)
    comparison = compare(got, one_device(case))
    detail = [str(comparison)]
    if not comparison.ok:
        from minidist.verify.causes.finding import Finding
        from minidist.verify.causes.reasons import reasons

        detail += reasons(Finding(got, one_device(case), case, ranks, "exact"))
    return {
        "case": name,
        "difference": comparison.difference,
        "ok": comparison.ok,
        "detail": "; ".join(detail),
    }


def gradients(group: Group, case: Case, settings: Settings) -> dict[str, np.ndarray]:
    """Return what the settings' trainer has after the batch of a case, as `one_device` has it."""
    case = case.to(group.device)
    trainer, x = trainer_for(case.model, group, settings), as_input(case.inputs)
    trainer.backward(replace(case.batch, inputs=x))
    moved = moved_by_forward(case.model)
    if isinstance(x, Tensor):
        own = x.xp.zeros_like(x.data) if x.grad is None else x.grad
        moved[INPUT] = to_host(group.all_reduce(own))
    return trainer.gradients() | moved
