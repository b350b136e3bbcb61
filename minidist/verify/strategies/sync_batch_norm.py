"""Data parallelism for models with batch normalisation, whose statistics are the whole batch's."""

from minidist import nn
from minidist.comm import Group
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.sync_batch_norm import sync_batch_norm
from minidist.rng import generator
from minidist.verify.strategies.cases import Case, random_weights
from minidist.verify.strategies.data_parallel import Replicas
from minidist.verify.strategies.record import Costs, Strategy


def replicas_in_step(group: Group, case: Case) -> Replicas:
    """Start replicas that share the statistics of their batch norms."""
    sync_batch_norm(case.model, group)
    return Replicas(group, case, all_reduce_gradients)


def batch_norm_cases(ranks: int) -> list[Case]:
    """A CNN on 7 images and on 3, and norms of rows of numbers between linear layers."""
    random = generator(0, "batch norm cases")
    images, labels = 1 + random.standard_normal((7, 2, 4, 4)), random.integers(0, 3, 7)
    cnn = random_weights(nn.CNN(2, 3, (4, 6), seed=1, dtype="float64"))
    of_rows = nn.Sequential(
        [
            nn.Linear(6, 5, activation="gelu", name="first", dtype="float64"),
            nn.BatchNorm(5, dtype="float64"),
            nn.Linear(5, 3, name="second", dtype="float64"),
        ]
    )
    rows = random.standard_normal((5, 6))
    return [
        Case("CNN, 7 images", cnn, images, labels),
        Case("rows, 5 examples", random_weights(of_rows), rows, labels[:5]),
        Case("CNN, 3 images", cnn, images[:3], labels[:3]),
    ]


def cnn_example(ranks: int) -> Case:
    """Return a CNN for the table of costs: no Transformer has batch norms."""
    random = generator(0, "strategy table")
    images, labels = random.standard_normal((8, 1, 8, 8)), random.integers(0, 10, 8)
    return Case("example", nn.CNN(1, 10, dtype="float64"), images, labels)


STRATEGIES = [
    Strategy(
        name="sync_batch_norm",
        idea="batch normalisation by the statistics of all ranks' examples",
        term="批归一化",
        paper="Ioffe and Szegedy 2015 (the layer); Peng et al. 2018",
        family="batch normalisation",
        files=("data_parallel/sync_batch_norm.py", "autograd/batch_norm.py", "nn/norms.py"),
        lesson="17b_batch_norm",
        start=replicas_in_step,
        cases=batch_norm_cases,
        costs=Costs(
            example=cnn_example,
        ),
        tests=("data_parallel/test_sync_batch_norm.py",),
    )
]
