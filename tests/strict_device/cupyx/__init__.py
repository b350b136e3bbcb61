"""A stand-in for cupyx: what minidist uses of it."""
