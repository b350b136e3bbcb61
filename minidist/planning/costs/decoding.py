"""What decoding keeps: bytes, without an array (nn/key_value_cache.py)."""


def cache_bytes(
    layers: int, batch: int, kv_heads: int, head_width: int, positions: int, itemsize: int = 4
) -> int:
    """Return the bytes of a cache with room for `positions`: 2 L B K T D numbers (K heads).

    A translator with one beginning of each source: positions = S + T. All beginnings of a source
    share its S, and have T each.
    """
    return 2 * layers * batch * kv_heads * positions * head_width * itemsize
