"""Products of eight-bit numbers on meshes: the gradient is one device's with these products."""

from dataclasses import replace

from minidist import nn
from minidist.autograd.eight_bits import EightBits
from minidist.mixed_precision import multiply_in_eight_bits
from minidist.rng import generator
from minidist.verify.strategies.cases import Case, random_weights
from minidist.verify.strategies.hybrid import (
    OnMesh,
    hybrid_example,
    mesh_costs,
    mesh_record,
    words_of,
)

MESHES: dict[int, list[dict]] = {  # ranks: what is asked for; the other ranks split matrices
    1: [{}],
    2: [{"dp": 2, "zero": 1}, {"pp": 2, "schedule": "zb_h1"}, {}, {"cp": 2}],
    3: [{"dp": 3}, {"pp": 3}],
    4: [{}, {"dp": 2}, {"dp": 2, "pp": 2}, {"cp": 2}],
    8: [{}, {"dp": 2, "pp": 2}, {"dp": 2, "cp": 2}, {"pp": 2, "cp": 2, "schedule": "zb_h1"}],
}


def in_eight_bits(case: Case, block: int | None = 4) -> Case:
    """Return the case with a model, its own from now on, that multiplies in eight bits."""
    multiply_in_eight_bits(case.model, EightBits(block))
    words = "a scale per array" if block is None else f"a scale per {block}"
    return replace(case, name=f"{case.name}, {words}")


def eight_bit_cases(ranks: int) -> list[Case]:
    """Several meshes of this many ranks, with scales of strips and blocks, and of arrays."""
    meshes = MESHES.get(ranks, [])
    found = [eight_bit_case(ranks, options, block) for options in meshes for block in (4, None)]
    return [*found, *(eight_bit_case(ranks, options, 4, llama=True) for options in meshes[:1])]


def eight_bit_case(ranks: int, options: dict, block: int | None, llama: bool = False) -> Case:
    """Return a case on a mesh; without cp the last strip of each example is shorter."""
    T = 16 if options.get("cp", 1) > 1 else 14
    tokens, nexts = generator(0, "eight-bit cases").integers(0, 11, (2, 5, T))
    model = nn.Transformer(11, 32, 8, 3, 16, 2, "float64")
    if llama:
        heads = 4 if ranks <= 4 else 8  # of keys and values: a rank has all of one
        model = nn.Llama(11, 32, 8, heads, 3, 16, 2, "float64", hidden=32)
    one = block is None or options.get("pp", 1) == 1  # an array is of one micro-batch
    m = {"micro_batches": 1} if one else {}
    name = f"{'Llama' if llama else 'GPT-2'}, {words_of(ranks, options)}"
    case = Case(name, random_weights(model, 1), tokens, nexts, options=options | m)
    return in_eight_bits(case, block)


STRATEGIES = [
    mesh_record(
        name="eight_bits",
        idea="products of eight-bit numbers, a scale for each strip, block or array",
        term="八位浮点乘法, 分块缩放",
        paper="DeepSeek-AI 2024 (DeepSeek-V3), section 3.3.2; Micikevicius et al. 2022",
        family="mixed precision",
        files=("autograd/eight_bits.py", "backend.py"),
        lesson="18_mixed_precision",
        start=OnMesh,
        cases=eight_bit_cases,
        costs=mesh_costs(
            example=lambda ranks: in_eight_bits(hybrid_example(ranks)),
            compared=False,
        ),
        tests=("test_eight_bits.py", "test_rounding.py"),
    )
]
