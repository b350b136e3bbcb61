"""References that one rank computes: the same training again, with the same stale weights."""
