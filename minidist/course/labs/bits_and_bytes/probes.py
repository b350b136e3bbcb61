"""What the bits-and-bytes lab asks of a student's code; it runs beside that code, judges nothing.

Ranks are threads.
"""

import numpy as np

from minidist import nn, optim
from minidist.course.labs.ranks import each_rank, refused
from minidist.data_parallel.compression import ErrorFeedback, Int8, Sign, TopK, random_levels
from minidist.data_parallel.local_sgd import DiLoCo
from minidist.data_parallel.power_sgd import PowerSGD
from minidist.parallel.mixed_precision import LossScale, MixedPrecision, overflow_allowed

RULES = {"top_k": TopK, "sign": Sign, "power_sgd": PowerSGD}
REFUSED = "the step that is refused, or -1"
COUNTS = "log2 of the scale, good steps in a row, skipped steps"


def counts_of(scale):
    return np.array([int(np.log2(scale.value)), scale.good, scale.skipped])


def scales(value, every, overflows):
    """Return the scale and its counts after each step, until one is refused."""
    scale, found = LossScale(value, every), {REFUSED: -1}
    for step, overflow in enumerate(overflows):
        if refused(scale.update, overflow):
            return found | {REFUSED: step}
        found[f"{COUNTS} after step {step}"] = counts_of(scale)
    return found


@each_rank("weights", len)
def stepped(group, weights, gradients, scale, every):
    """Return what each step makes of this rank's own parameter in float16, and the bytes.

    gradients  [step][rank], without the scale; every third step is clipped
    """
    layer = nn.Linear(len(weights[group.rank]), 1, bias=False, name="w").astype("float16").flatten()
    w, found = layer.weight, {}
    w.data[:, 0] = weights[group.rank]
    optimizer = MixedPrecision(optim.Adam([w], lr=1e-3), group, LossScale(scale, every))
    for step, grads in enumerate(gradients):
        with overflow_allowed():
            w.grad = (grads[group.rank] * optimizer.loss_scale).astype("float16")[:, None]
        if step % 3 == 0:
            optimizer.clip_global_norm(0.5)
        optimizer.step()
        found[f"the weights after step {step}"] = w.data.copy()
        found[f"their float32 copies after step {step}"] = optimizer.copies[0].copy()
        found[f"{COUNTS} after step {step}"] = counts_of(optimizer.scale)
        found[f"the updates after step {step}"] = optimizer.steps
        optimizer.zero_grad()
    return found | {"bytes": group.ledger.total}


@each_rank("N")
def fed_back(group, N, sizes, rule, option, gradients, scales, skipped):
    """Return each step's sums where they are finite, and what is owed after it.

    gradients  [step][rank] {name: array, or no entry}, without the loss scale
    scales     [step], or empty: there is none; skipped: the steps that the optimizer skips
    """
    model = nn.MLP(sizes, dtype="float64")
    optimizer = optim.SGD(model.parameters(), 0.1)
    if scales:
        optimizer = MixedPrecision(optimizer, group, LossScale())
    feedback, found = ErrorFeedback(model, group, RULES[rule](*option)), {}
    for step, grads in enumerate(gradients):
        model.zero_grad()
        if scales:
            optimizer.scale.value = scales[step]
        for name, g in grads[group.rank].items():
            model.named_parameters()[name].grad = g * optimizer.loss_scale
        with overflow_allowed():
            feedback.all_reduce_gradients()
        if step in skipped:
            optimizer.scale.skipped += 1
        for name, p in model.named_parameters().items():
            if np.isfinite(p.grad).all():
                found[f"the sum of {name} at step {step}"] = p.grad.copy()
            owed = np.array(feedback.errors.get(name, np.zeros(p.shape)))
            found[f"what is owed of {name} after step {step}"] = owed
        found[f"the number of steps after step {step}"] = feedback.steps
    return found | {"sums that are summed again": refused(feedback.all_reduce_gradients)}


@each_rank("N")
def rounds(group, N, sizes, start, states, inner, every, outer, gradients, loads):
    """Return the weights after each step, until one is refused, and the bytes.

    loads  (step, whose state of `states` each rank loads before it: "one" for all, or "its own")
    """
    model, found = nn.MLP(sizes, dtype="float64"), {REFUSED: -1}
    model.load_state(start)
    local = DiLoCo(model, group, getattr(optim, inner)(model.parameters(), 0.1), every, **outer)
    for step, grads in enumerate(gradients):
        for whose in (whose for at, whose in loads if at == step):
            model.load_state(states[0 if whose == "one" else group.rank])
        for name, p in model.named_parameters().items():
            p.grad = grads[group.rank][name]
        if refused(local.step):
            return found | {REFUSED: step}
        local.zero_grad()
        weights = [p.data.reshape(-1) for p in model.parameters()]
        found[f"the weights after step {step}"] = np.concatenate(weights)
    return found | {"bytes": group.ledger.total}


def levels(x, level, draws):
    found = random_levels(x, level, draws)
    return {"the levels": found, "their dtype": np.array(str(found.dtype))}


@each_rank("vectors", len)
def eight_bits(group, vectors, dtype, seed, step, name):
    v = vectors[group.rank]
    total, kept, own = Int8(seed)(v.copy(), nn.Parameter(v.astype(dtype), name), group, step)
    return {
        "the sum": total,
        "what is sent": own,
        "v": kept,
        "the dtypes of Sent": np.array([str(array.dtype) for array in (total, kept, own)]),
        "(v - own) + own is v": bool(((kept - own) + own == kept).all()),
        "bytes": group.ledger.total,
    }
