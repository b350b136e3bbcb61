"""A plan by hand, and the best of all plans by search, for Transformers of any size."""
