"""The certificate of a training run: its trainer's gradients equal one device's.

Of a run with servers also the replay: one rank repeats it from their logs, bit for bit.
"""

import copy
from dataclasses import replace

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.backend import to_host
from minidist.comm import Group, run
from minidist.data_parallel.parameter_server import Push
from minidist.rng import generator
from minidist.training.kinds import Data, kind_of, model_of
from minidist.training.servers import Minibatches, Served, plan_of, rule, workers_among
from minidist.training.settings import Settings
from minidist.training.setup import examples_of, trainer_for
from minidist.verify.compare import compare
from minidist.verify.strategies.cases import INPUT, Case, as_input, moved_by_forward, one_device
from minidist.verify.strategies.parameter_server import replay_server


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
    settings = replace(settings, precision="float32")  # the trainer keeps the model's float64
    got = run(gradients, ranks, case, settings, transport=transport, device=device)
    want = one_device(case)
    comparison = compare(got, want)
    detail = [str(comparison)]
    if not comparison.ok:
        from minidist.verify.causes.finding import Finding
        from minidist.verify.causes.reasons import reasons

        detail += reasons(Finding(got, want, case, ranks, "exact"))
    return {
        "case": name,
        "difference": comparison.difference,
        "ok": comparison.ok,
        "detail": "; ".join(detail),
    }


def gradients(group: Group, case: Case, settings: Settings) -> dict[str, np.ndarray]:
    """Return the arrays of `one_device`, from the settings' trainer after the case's batch."""
    case = case.to(group.device)
    trainer, x = trainer_for(case.model, group, settings), as_input(case.inputs)
    trainer.backward(replace(case.batch, inputs=x))
    moved = moved_by_forward(case.model)
    if isinstance(x, Tensor):
        part = x.xp.zeros_like(x.data) if x.grad is None else x.grad
        moved[INPUT] = to_host(group.all_reduce(part))
    return trainer.gradients() | moved


def replayed(ranks: list[Served], data: Data, settings: Settings, **where) -> int:
    """Repeat a run from its servers' logs; return the number of arrays, all equal bit for bit.

    where  device, timeout and transport, see run; RuntimeError if a bit differs
    """
    logs, model = [rank.log for rank in ranks if rank.log is not None], model_of(data, settings)
    examples = examples_of(data, settings)
    want = run(replay, len(ranks), model, examples, settings, logs, **where)[0]
    if wrong := [n for n, w in want.items() if not np.array_equal(w, ranks[0].state[n])]:
        raise RuntimeError(f"the replay of the servers' logs has other bits in {wrong}")
    return len(want)


def replay(
    group: Group,
    model: nn.Module,
    examples: tuple[np.ndarray, np.ndarray],
    settings: Settings,
    logs: list[list[list[Push]]],
) -> dict[str, np.ndarray] | None:
    """Return, on rank 0, the weights after the updates in the servers' logs, from the model's.

    Run it on as many ranks as trained. ValueError if a minibatch is not in each log exactly once.
    """
    if group.rank > 0:
        return None  # it only takes its share of the cores
    plan, workers = plan_of(settings), workers_among(group.size, settings)
    minibatches = Minibatches(*examples, settings, workers)
    dealt = {plan.servers + w: list(minibatches.of(w)) for w in range(workers)}
    optimizer, model = rule(settings, workers), model.to(group.device)
    return replay_server(model, plan, logs, dealt, minibatches.backward, optimizer)
