"""Every strategy as its judge sees it: a worker to run on ranks, a promise, and a bill of bytes.

A worker starts from the weights of a single-device model, takes one batch, and returns the
gradients that it leaves on its rank. One file per axis; `cases.py` has what they share.
"""

from functools import partial

from minidist.data_parallel.parameter_server import Plan
from minidist.tools.strategies.cases import (
    ANY,
    INPUT,
    LAYERS,
    LINEAR,
    SIAMESE,
    TRANSFORMER,
    Case,
    Outcome,
    Split,
    Strategy,
    collect,
    one_device,
    small_cases,
)
from minidist.tools.strategies.data_parallel import (
    bucketed_worker,
    by_examples,
    data_parallel_bytes,
    naive_worker,
    zero_bytes,
    zero_cases,
    zero_worker,
)
from minidist.tools.strategies.hybrid import by_mesh, hybrid_bytes, hybrid_cases, hybrid_worker
from minidist.tools.strategies.parameter_server import (
    by_workers,
    clock_bytes,
    downpour_cases,
    parameter_server_worker,
    stale_bytes,
    stale_worker,
)
from minidist.tools.strategies.pipeline_parallel import (
    by_layers,
    by_layers_of_a_stream,
    pipedream_worker,
    pipeline_bytes,
    pipeline_cases,
    pipeline_worker,
    stream_bytes,
    stream_cases,
)
from minidist.tools.strategies.siamese import siamese_bytes, siamese_cases, siamese_worker
from minidist.tools.strategies.tensor_parallel import (
    attention_bytes,
    by_matrices,
    column_bytes,
    mlp_cases,
    row_bytes,
    sequence_bytes,
    tensor_worker,
    transformer_cases,
    vocab_bytes,
)

__all__ = ["INPUT", "STRATEGIES", "Case", "Outcome", "Split", "Strategy", "collect", "one_device"]

_ALL = [
    Strategy("naive", naive_worker, "exact", data_parallel_bytes, small_cases, split=by_examples),
    Strategy(
        "bucketed", bucketed_worker, "exact", data_parallel_bytes, small_cases, split=by_examples
    ),
    *(
        Strategy(
            f"zero_{stage}",
            partial(zero_worker, stage=stage),
            "exact",
            partial(zero_bytes, stage=stage),
            partial(zero_cases, stage=stage),
            split=by_examples,
            models=LAYERS if stage > 1 else ANY,
        )
        for stage in (1, 2, 3)
    ),
    Strategy(
        "parameter_server",
        parameter_server_worker,
        "exact",
        clock_bytes,
        small_cases,
        ranks=(2, 3, 4),
        split=by_workers,
    ),
    *(
        Strategy(
            name,
            partial(stale_worker, plan=Plan(staleness=staleness)),
            "replayed bitwise",
            stale_bytes,
            cases,
            ranks=(2, 3, 4),
        )
        for name, staleness, cases in (
            ("downpour", None, downpour_cases),
            ("ssp", 1, stream_cases),
        )
    ),
    Strategy(
        "siamese", siamese_worker, "exact", siamese_bytes, siamese_cases, (1, 2), models=SIAMESE
    ),
    *(
        Strategy(
            schedule,
            partial(pipeline_worker, schedule=schedule),
            "exact",
            partial(pipeline_bytes, schedule=schedule),
            partial(pipeline_cases, schedule=schedule),
            split=partial(by_layers, schedule=schedule),
        )
        for schedule in ("layer_split", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v")
    ),
    *(
        Strategy(
            name,
            partial(pipedream_worker, scheme=scheme),
            "replayed bitwise",
            stream_bytes,
            stream_cases,
            split=by_layers_of_a_stream,
        )
        for name, scheme in (("pipedream", "weight_stashing"), ("pipedream_2bw", "2bw"))
    ),
    *(
        Strategy(
            name,
            partial(tensor_worker, split=name),
            "exact",
            bytes_moved,
            cases,
            split=by_matrices,
            models=models,
        )
        for name, bytes_moved, cases, models in (
            ("column", column_bytes, mlp_cases, LINEAR),
            ("row", row_bytes, mlp_cases, LINEAR),
            ("attention", attention_bytes, transformer_cases, TRANSFORMER),
            ("vocab", vocab_bytes, transformer_cases, TRANSFORMER),
            ("sequence", sequence_bytes, transformer_cases, TRANSFORMER),
        )
    ),
    Strategy(
        "hybrid",
        hybrid_worker,
        "exact",
        hybrid_bytes,
        hybrid_cases,
        (1, 2, 3, 4, 8),
        by_mesh,
        TRANSFORMER,
    ),
]
STRATEGIES = {strategy.name: strategy for strategy in _ALL}
