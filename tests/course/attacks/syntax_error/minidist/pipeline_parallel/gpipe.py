"""Is no Python."""

def gpipe(rank, p, m)
    return []
