"""The tests run on mutants: the single device's, which they pass, and the ones that kill them.

All mutants meet the same tests; only the order differs, by the family of strategies that the mutant
belongs to. A strategy's record names its family and its tests.
"""

from minidist.verify.strategies import STRATEGIES

# Differentiation knows no ranks: files outside of these cannot change what they compute.
OF_ONE_DEVICE = ("autograd", "nn", "optim", "rng.py", "datasets", "backend.py")
SINGLE_DEVICE = [
    "tests/autograd",
    "tests/nn",
    "tests/datasets",
    *(f"tests/test_{name}.py" for name in ("optim", "rng", "backend")),
]
EQUIVALENCE = "tests/verify/test_equivalence.py"
CERTIFICATE = f"{EQUIVALENCE}::test_every_strategy_keeps_its_promise"


def _families() -> dict[str, tuple[list[str], list[str]]]:
    found: dict[str, tuple[list[str], list[str]]] = {}
    for name, record in STRATEGIES.items():
        names, tests = found.setdefault(record.family, ([], []))
        names.append(name)
        tests += [test for path in record.tests if (test := f"tests/{path}") not in tests]
    return found


PLANNING = """test_pipedream test_tofu test_clock
flexflow/test_soap flexflow/test_simulator flexflow/test_search
 plans/test_step_time plans/test_plan_search""".split()
COSTS = "memory", "traffic", "in_flight", "transformer_size"
# {family: (the strategies whose certificates come first, and then these tests)}
FAMILIES = _families() | {  # and what strategies are built on
    "communication": (
        [],
        [
            "tests/comm/test_collectives.py",
            "tests/comm/test_hierarchical.py",
            "tests/comm/conformance",
        ],
    ),
    "checkpoints": (
        [],
        [
            f"tests/checkpoint/test_{name}.py"
            for name in ("what_is_lost", "half_precision", "resharding", "llama")
        ],
    ),
    "placements": (
        [],
        [f"tests/planning/gspmd/test_{name}.py" for name in ("placement", "rules", "propagation")],
    ),
    "translation": ([], ["tests/nn/test_seq2seq.py", "tests/nn/test_generate.py"]),
    "decoding": (
        [],
        ["tests/test_key_value_cache.py", "tests/test_cached_translator.py"],
    ),
    "translators": ([], ["tests/data_parallel/test_dual.py"]),
    "eight bits": ([], ["tests/test_eight_bits.py"]),
    "collective functions": ([], ["tests/test_collective_functions.py"]),
    "planning": (
        [],
        [
            *(f"tests/planning/{name}.py" for name in PLANNING),
            *(f"tests/planning/costs/test_{name}.py" for name in COSTS),
        ],
    ),
}
# Overlap and speed: what a busy machine can change, and says nothing of right or wrong.
TIMING = [
    "hybrid/test_sums.py::test_the_first_sum_is_under_way",
    "data_parallel/test_bucketed.py::test_the_first_bucket_is_under_way",
    "data_parallel/test_zero_memory.py::test_weights_come_while_the_layer_before",
    "data_parallel/test_parameter_server.py::test_with_a_slow_worker",
    "data_parallel/test_parameter_server.py::test_a_bound_keeps_fast_workers_near",
]
PROPERTIES = [
    EQUIVALENCE,
    *dict.fromkeys(test for _, tests in FAMILIES.values() for test in tests),
]
