"""What the bits-and-bytes lab asks. The right answer is what the package itself answers."""

import numpy as np

from minidist import nn
from minidist.course.labs.bits_and_bytes import probes
from minidist.course.question import Questions, Random, ask, ints, ranks
from minidist.errors import plural


def drawn(rng: Random, sizes: list[int]) -> dict[str, np.ndarray]:
    """Draw an array for each parameter of an MLP."""
    named = nn.MLP(sizes).named_parameters().items()
    return {name: rng.standard_normal(p.shape) for name, p in named}


def loss_scales(rng: Random) -> Questions:
    often, overflows = int(rng.integers(2, 4)), (rng.random(14) < 0.25).tolist()
    for value, every, steps in (
        (2.0**12, often, overflows),
        (2.0**12, 1, overflows),
        (2.0**125, 1, [False] * 4),
        (1.0, None, [True, False, True]),
        (2.0, often, [False, True, False, True]),
        (0.5, often, [False, True]),
    ):
        about = "static" if every is None else f"doubled after {plural(every, 'good step')}"
        given = {"value": value, "every": every, "overflows": steps}
        yield ask(f"a scale of {value:g}, {about}", probes.scales, group="the scale", **given)
    for N, odd in ((1, np.inf), (2, 0.0), (3, np.inf), (4, np.nan)):
        who, sizes = int(rng.integers(N)), ints(rng, 1, 5, N)
        gradients = [[rng.uniform(-0.9, 0.9, n) for n in sizes] for _ in range(9)]
        for step in gradients:
            step[who][0] = rng.uniform(1.1, 1.5)  # overflows at a scale of 2^16
        gradients[2][(who + 1) % N][-1] = odd
        given = {"weights": [rng.standard_normal(n) for n in sizes], "gradients": gradients}
        about = f"{plural(N, 'rank')}, {plural(often, 'good step')} in a row, a gradient of {odd}"
        yield ask(about, probes.stepped, group=ranks(N), scale=2.0**14, every=often, **given)


def feedback(rng: Random) -> Questions:
    top_k, thin = ("top_k", [rng.uniform(0.2, 0.4)]), ("power_sgd", [int(rng.integers(1, 3))])
    sign: tuple[str, list] = ("sign", [])
    for group, N, (rule, option), scaled, kinds in (  # i: an infinite sum; s: skipped otherwise
        ("no loss scale", 1, top_k, False, "...."),
        ("no loss scale", 3, sign, False, "...."),
        ("no loss scale", 2, thin, False, "...."),
        ("a loss scale", 1, top_k, True, "...."),
        ("a loss scale", 3, sign, True, "...."),
        ("skipped steps", 3, top_k, True, "s.i.is."),
        ("skipped steps", 2, thin, True, ".s.ssi."),
        ("skipped steps", 2, top_k, False, ".i.ii."),
    ):
        sizes, skipped = ints(rng, 3, 6, 3), [k for k, kind in enumerate(kinds) if kind != "."]
        gradients = [[drawn(rng, sizes) for _ in range(N)] for _ in kinds]
        gradients[2][N - 1] = {}  # this rank had no batch
        for step in skipped:
            if kinds[step] == "i":
                gradients[step][0]["layers.1.weight"][0, 0] = np.inf
        scales = [2.0 ** int(rng.integers(-3, 4)) for _ in kinds] if scaled else []
        given = {"N": N, "sizes": sizes, "rule": rule, "option": option, "scales": scales}
        about = f"{rule}, {plural(N, 'rank')}, {group} {skipped or ''}".strip()
        given |= {"gradients": gradients, "skipped": skipped if scaled else []}
        yield ask(about, probes.fed_back, group=group, **given)


def outer(rng: Random) -> Questions:
    some = int(rng.integers(3, 6))
    for N, inner, every, steps, loads in (
        (1, "SGD", 2, 5, []),
        (2, "AdamW", 1, 4, []),
        (2, "SGD", 3, 7, []),
        (some, "AdamW", 2, 7, []),
        (3, "SGD", some, 2 * some + 1, []),
        (2, "AdamW", 3, 8, [(4, "one")]),
        (3, "SGD", 2, 7, [(2, "one"), (5, "one")]),
        (2, "SGD", 3, 6, [(4, "its own")]),
    ):
        sizes, settings = ints(rng, 2, 5, 3), rng.uniform(0.4, 0.9, 2)
        about = f"{plural(N, 'rank')}, {inner}, {plural(every, 'local step')}"
        about += "".join(f", before step {k} each loads {whose} state" for k, whose in loads)
        given = {"N": N, "sizes": sizes, "inner": inner, "every": every, "loads": loads}
        given |= {"outer": dict(zip(("lr", "momentum"), settings.tolist(), strict=True))}
        given |= {"states": [drawn(rng, sizes) for _ in range(N)], "start": drawn(rng, sizes)}
        given |= {"gradients": [[drawn(rng, sizes) for _ in range(N)] for _ in range(steps)]}
        group = "weights that are loaded" if loads else ranks(N)
        yield ask(about, probes.rounds, group=group, **given)


def eight_bits(rng: Random) -> Questions:
    n = int(rng.integers(20, 40))
    x = rng.uniform(-1, 1, n)
    for about, numbers, level in (
        ("drawn numbers", x, 0.15),
        ("numbers below a level", x, 2.0),
        ("whole levels", rng.integers(-7, 8, n) * 0.5, 0.5),
        ("numbers above the largest level", 127.9 * np.sign(x), 1.0),
        ("zeros", 0 * x, 0.0),
    ):
        given = {"x": numbers, "level": np.array([level]), "draws": rng.random(n)}
        yield ask(about, probes.levels, group="levels", **given)
    for N, shape, dtype in ((1, [n], "float64"), (2, [3, 7], "float32"), (4, [n], "float64")):
        sizes = 10 ** rng.uniform(-3, 3, N)  # every rank needs a level of its own
        sizes[2:3] = 0
        vectors, (seed, step) = [s * rng.standard_normal(shape) for s in sizes], ints(rng, 1, 99, 2)
        about = f"{plural(N, 'rank')}, {shape}, {dtype}{', one sends zeros' if N > 2 else ''}"
        sent = {"vectors": vectors, "dtype": dtype, "seed": seed, "step": step}
        yield ask(about, probes.eight_bits, group=ranks(N), **sent, name=f"p{rng.integers(99)}")


QUESTIONS = {"8.1": loss_scales, "8.2": feedback, "8.3": outer, "8.4": eight_bits}
