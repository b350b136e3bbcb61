"""Bits and bytes: one loss scale for all ranks, error feedback, an outer step, eight bits."""

import numpy as np
import pytest

from minidist import nn, optim
from minidist.course.inside import inside, task
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


@inside
def scales(value, every, overflows):
    """Return the scale and its counts after each step, until one is refused."""
    scale, found = LossScale(value, every), {REFUSED: -1}
    for step, overflow in enumerate(overflows):
        if refused(scale.update, overflow):
            return found | {REFUSED: step}
        found[f"{COUNTS} after step {step}"] = counts_of(scale)
    return found


@inside
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
    return found | {"bytes": group.ledger.total}


@inside
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


@inside
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


@inside
def levels(x, level, draws):
    found = random_levels(x, level, draws)
    return {"the levels": found, "their dtype": np.array(str(found.dtype))}


@inside
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


FEW, ANY = "one or two ranks", "any number of ranks"


def drawn(rng, sizes):
    """Draw an array for each parameter of an MLP."""
    named = nn.MLP(sizes).named_parameters().items()
    return {name: rng.standard_normal(p.shape) for name, p in named}


@task("8.1")
@pytest.mark.parametrize("value", [2.0**12, 2.0**125, 1.0, 2.0, 0.5])
def test_a_scale_is_halved_doubled_or_refused(value, rng):
    often, random = int(rng.integers(2, 4)), (rng.random(14) < 0.25).tolist()
    for every, overflows in {
        2.0**12: [(often, random), (1, random)],
        2.0**125: [(1, [False] * 4)],
        1.0: [(None, [True, False, True])],
        2.0: [(often, [False, True, False, True])],
        0.5: [(often, [False, True])],
    }[value]:
        scales.check(value, every, overflows)


@task("8.1")
@pytest.mark.parametrize(
    "group, N, odd, often",
    [(FEW, 1, np.inf, 2), (FEW, 2, 0.0, 3), (ANY, 3, np.inf, 3), (ANY, 4, np.nan, 2)],
)
def test_all_ranks_have_one_scale(group, N, odd, often, rng):
    who, sizes = int(rng.integers(N)), rng.integers(1, 5, N)
    gradients = [[rng.uniform(-0.9, 0.9, n) for n in sizes] for _ in range(9)]
    for step in gradients:
        step[who][0] = rng.uniform(1.1, 1.5)  # overflows at a scale of 2^16
    gradients[2][(who + 1) % N][-1] = odd
    weights = [rng.standard_normal(n) for n in sizes]
    stepped.check(weights=weights, gradients=gradients, scale=2.0**14, every=often)


@task("8.2")
@pytest.mark.parametrize(
    "group, N, rule, scaled, kinds",  # i: an infinite sum; s: skipped otherwise
    [
        ("no loss scale", 1, "top_k", False, "...."),
        ("no loss scale", 3, "sign", False, "...."),
        ("no loss scale", 2, "power_sgd", False, "...."),
        ("a loss scale", 1, "top_k", True, "...."),
        ("a loss scale", 3, "sign", True, "...."),
        ("skipped steps", 3, "top_k", True, "s.i.is."),
        ("skipped steps", 2, "power_sgd", True, ".s.ssi."),
        ("skipped steps", 2, "top_k", False, ".i.ii."),
    ],
)
def test_what_is_not_sent_is_owed(group, N, rule, scaled, kinds, rng):
    sizes, skipped = rng.integers(3, 6, 3).tolist(), [k for k, s in enumerate(kinds) if s != "."]
    gradients = [[drawn(rng, sizes) for _ in range(N)] for _ in kinds]
    gradients[2][N - 1] = {}  # this rank had no batch
    for step in skipped:
        if kinds[step] == "i":
            gradients[step][0]["layers.1.weight"][0, 0] = np.inf
    option = {"top_k": [rng.uniform(0.2, 0.4)], "sign": [], "power_sgd": [int(rng.integers(1, 3))]}
    given = {"N": N, "sizes": sizes, "rule": rule, "option": option[rule], "gradients": gradients}
    given |= {"scales": [2.0 ** int(rng.integers(-3, 4)) for _ in kinds] if scaled else []}
    fed_back.check(**given, skipped=skipped if scaled else [])


LOADED = "weights that are loaded"


@task("8.3")
@pytest.mark.parametrize(
    "group, N, inner, every, steps, loads",
    [
        (FEW, 1, "SGD", 2, 5, []),
        (FEW, 2, "AdamW", 1, 4, []),
        (FEW, 2, "SGD", 3, 7, []),
        (ANY, 4, "AdamW", 2, 7, []),
        (ANY, 3, "SGD", 4, 9, []),
        (LOADED, 2, "AdamW", 3, 8, [(4, "one")]),
        (LOADED, 3, "SGD", 2, 7, [(2, "one"), (5, "one")]),
        (LOADED, 2, "SGD", 3, 6, [(4, "its own")]),
    ],
)
def test_an_outer_step_follows_local_ones(group, N, inner, every, steps, loads, rng):
    sizes = rng.integers(2, 5, 3).tolist()
    given = {"N": N, "sizes": sizes, "inner": inner, "every": every, "loads": loads}
    lr, momentum = rng.uniform(0.4, 0.9, 2).tolist()
    given |= {"outer": {"lr": lr, "momentum": momentum}, "start": drawn(rng, sizes)}
    given |= {"states": [drawn(rng, sizes) for _ in range(N)]}
    rounds.check(**given, gradients=[[drawn(rng, sizes) for _ in range(N)] for _ in range(steps)])


@task("8.4")
def test_a_level_is_drawn_so_that_its_mean_is_the_number(rng):
    n = int(rng.integers(20, 40))
    x = rng.uniform(-1, 1, n)
    whole, largest = rng.integers(-7, 8, n) * 0.5, 127.9 * np.sign(x)
    for numbers, level in ((x, 0.15), (x, 2.0), (whole, 0.5), (largest, 1.0), (0 * x, 0.0)):
        levels.check(numbers, np.array([level]), rng.random(n))


@task("8.4")
@pytest.mark.parametrize(
    "group, N, shape, dtype",
    [(FEW, 1, [29], "float64"), (FEW, 2, [3, 7], "float32"), (ANY, 4, [29], "float64")],
)
def test_every_rank_sends_a_level_of_its_own(group, N, shape, dtype, rng):
    sizes = 10 ** rng.uniform(-3, 3, N)
    sizes[2:3] = 0
    vectors, (seed, step) = [s * rng.standard_normal(shape) for s in sizes], rng.integers(1, 99, 2)
    given = {"vectors": vectors, "dtype": dtype, "seed": int(seed), "step": int(step)}
    eight_bits.check(**given, name=f"p{rng.integers(99)}")
