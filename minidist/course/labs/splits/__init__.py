"""A lab: see lab.toml, and test_*.py for what its tasks test."""
