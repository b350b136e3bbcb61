"""Split matrices and images: a rank has a part of each matrix, or of each image; all examples."""

from functools import partial

from minidist import nn
from minidist.comm import Group
from minidist.nn.cnn import ConvBlock
from minidist.planning.costs import strategies as costs
from minidist.rng import generator
from minidist.tensor_parallel import SpatialParallel, TensorParallel
from minidist.tensor_parallel.spatial_parallel import ROWS
from minidist.verify.strategies.cases import (
    Case,
    cnn_example,
    heads_of,
    padded,
    random_weights,
    translator_case,
)
from minidist.verify.strategies.job import AtWork
from minidist.verify.strategies.record import (
    LINEAR,
    TRANSFORMER,
    TRANSFORMERS,
    Costs,
    Models,
    Strategy,
    record,
)

CNN = Models("an nn.CNN", lambda model: isinstance(model, nn.CNN))


def rows_of_images(group: Group, case: Case) -> AtWork:
    """Start a CNN on this rank's rows of all images."""
    return AtWork(group, case, SpatialParallel, height=case.inputs.shape[ROWS])


def mlp_cases(ranks: int) -> list[Case]:
    """Seven examples, and one, of an MLP whose widths 1 to 4 ranks can split."""
    random = generator(0, "tensor cases")
    mlp = random_weights(nn.MLP([12, 24, 12], activation="gelu", seed=1, dtype="float64"))
    images, labels = random.standard_normal((7, 12)), random.integers(0, 12, 7)
    return [
        Case("MLP, 7 examples", mlp, images, labels),
        Case("MLP, 1 example", mlp, images[:1], labels[:1]),
    ]


def transformer_cases(ranks: int) -> list[Case]:
    """A tied Transformer with dropout, an untied one, a Llama; vocabulary and targets are padded.

    Of the Llama, 4 ranks have 2 heads of keys and values.
    """
    tokens, nexts = generator(0, "tensor cases").integers(0, 11, (2, 5, 12))
    kv_heads = 3 if ranks == 3 else 2
    models = {
        f"Transformer, {'tied' if tied else 'untied'}": nn.Transformer(
            11, 24, 12, 2, 12, 2, "float64", 0.2, tied
        )
        for tied in (True, False)
    } | {"Llama": nn.Llama(11, 24, 12, kv_heads, 2, 12, 2, "float64", hidden=24)}
    return [
        Case(name, random_weights(model), tokens, padded(nexts)) for name, model in models.items()
    ]


def transformers_cases(ranks: int) -> list[Case]:
    """The cases of transformer_cases, and a Seq2Seq of two vocabularies, 13 and 11, both padded."""
    return [*transformer_cases(ranks), translator_case(width=24, heads=12)]


def mlp_example(ranks: int) -> Case:
    """Return an MLP whose widths 4 ranks can split, for the table of costs."""
    random = generator(0, "strategy table")
    labels, images = random.integers(0, 2, 8), random.standard_normal((8, 16))
    model = nn.MLP([16, *[256, 64] * 3, 256, 16], activation="gelu", dtype="float64")
    return Case("example", model, images, labels)


def cnn_cases(ranks: int) -> list[Case]:
    """Five images and one; blocks with and without a skip's convolution; rows that come uneven."""
    random, cases = generator(0, "convolution cases"), []
    for B, H, widths in ((5, 8, (12, 12, 24)), (1, 10, (12, 24))):
        images, labels = 1 + random.standard_normal((B, 2, H, 6)), random.integers(0, 3, B)
        model = random_weights(nn.CNN(2, 3, widths, seed=1, dtype="float64"))
        cases.append(Case(f"CNN of {len(widths)} blocks, images {B}", model, images, labels))
    return cases


def narrowest(axis: int, part: str, case: Case, ranks: int) -> tuple[int, str]:
    """Return the fewest rows (axis 0) or columns (axis 1) of a matrix."""
    assert isinstance(case.model, nn.Sequential)
    return min(shape[axis] for shape in costs.shapes_of(case.model)), part


def heads_limit(case: Case, ranks: int) -> tuple[int, str]:
    return heads_of(case.model), "heads"


def tokens_limit(case: Case, ranks: int) -> tuple[int, str]:
    assert isinstance(case.model, nn.Transformer | nn.Seq2Seq)
    return case.model.vocab, "tokens"


def channels_limit(case: Case, ranks: int) -> tuple[int, str]:
    blocks = case.model.modules(ConvBlock)
    return min(block.second.norm.gain.size for block in blocks), "channels"


def rows_limit(case: Case, ranks: int) -> tuple[int, str]:
    """Return the rows of the last output: a skip with a convolution goes with half the rows."""
    halvings = sum(block.skip is not None for block in case.model.modules(ConvBlock))
    return -(-case.inputs.shape[ROWS] // 2**halvings), "rows"


def matrices(split: str, **work) -> Strategy:
    """Return the record of a split of matrices; by default, of Transformers."""
    make = partial(TensorParallel, split=split)
    return record(split, make=make, **{"cases": transformers_cases, "models": TRANSFORMERS} | work)


_costs = partial(Costs, cuts="matrices")
STRATEGIES = [
    matrices(
        "column",
        cases=mlp_cases,
        models=LINEAR,
        costs=_costs(
            bytes=costs.column_bytes, limit=partial(narrowest, 1, "columns"), example=mlp_example
        ),
    ),
    matrices(
        "row",
        cases=mlp_cases,
        models=LINEAR,
        costs=_costs(
            bytes=costs.row_bytes, limit=partial(narrowest, 0, "rows"), example=mlp_example
        ),
    ),
    matrices("attention", costs=_costs(limit=heads_limit)),
    matrices("vocab", costs=_costs(limit=tokens_limit)),
    matrices(
        "sequence",
        cases=transformer_cases,
        models=TRANSFORMER,
        costs=_costs(
            limit=lambda case, ranks: (min(heads_of(case.model), case.inputs.shape[1]), "heads")
        ),
    ),
    matrices(
        "channel",
        cases=cnn_cases,
        models=CNN,
        costs=_costs(limit=channels_limit, example=cnn_example),
    ),
    record(
        "spatial",
        start=rows_of_images,
        cases=cnn_cases,
        models=CNN,
        costs=Costs(limit=rows_limit, cuts="positions", example=cnn_example),
    ),
]
