"""The tests that mutants meet: those of a single device, which they pass, and those that kill them.

All mutants meet the same tests; only the order differs, by the family of strategies that the mutant
belongs to.
"""

# Differentiation knows no ranks: what lies outside of these cannot change what they compute.
OF_ONE_DEVICE = ("autograd", "nn", "optim.py", "rng.py", "datasets.py", "backend.py")
SINGLE_DEVICE = [
    "tests/autograd",
    "tests/nn",
    *(f"tests/test_{name}.py" for name in ("optim", "rng", "datasets", "backend")),
]
EQUIVALENCE = "tests/tools/test_equivalence.py"
CERTIFICATE = f"{EQUIVALENCE}::test_every_strategy_keeps_its_promise"

# {family: (the strategies whose certificates come first, and then these tests)}
FAMILIES = {
    family: (strategies.split(), [f"tests/{folder}test_{name}.py" for name in names.split()])
    for family, strategies, folder, names in (
        ("data parallelism", "naive bucketed", "data_parallel/", "naive bucketed"),
        ("ZeRO", "zero_1 zero_2 zero_3", "data_parallel/", "zero_memory zero"),
        (
            "parameter server",
            "parameter_server downpour ssp",
            "data_parallel/",
            "parameter_server sparse_update",
        ),
        ("branches", "siamese", "pipeline_parallel/", "branch_placement"),
        (
            "pipeline",
            "layer_split gpipe 1f1b interleaved",
            "pipeline_parallel/",
            "schedules executor pipeline equivalence memory",
        ),
        ("zero bubble", "zb_h1 zb_h2 zb_v", "pipeline_parallel/", "zero_bubble validation"),
        ("PipeDream", "pipedream pipedream_2bw", "pipeline_parallel/", "pipedream"),
        (
            "matrices",
            "column row attention vocab",
            "tensor_parallel/",
            "column_parallel row_parallel vocab_parallel parallel_transformer",
        ),
        ("sequence", "sequence", "tensor_parallel/", "parallel_transformer"),
        ("hybrid", "hybrid", "", "hybrid"),
        ("communication", "", "comm/", "collectives group scatter_and_gather"),
        ("collective functions", "", "", "collective_functions"),
    )
}
# Overlap and speed: what a busy machine can change, and says nothing of right or wrong.
TIMING = [
    "data_parallel/test_bucketed.py::test_the_first_bucket_is_under_way",
    "data_parallel/test_zero_memory.py::test_weights_come_while_the_layer_before",
    "data_parallel/test_parameter_server.py::test_with_a_slow_worker",
    "data_parallel/test_parameter_server.py::test_a_bound_keeps_fast_workers_near",
]
PROPERTIES = [
    EQUIVALENCE,
    *dict.fromkeys(test for _, tests in FAMILIES.values() for test in tests),
]
