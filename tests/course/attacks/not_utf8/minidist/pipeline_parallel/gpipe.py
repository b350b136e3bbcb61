# -*- coding: latin-1 -*-
"""Is written in another encoding."""

NAME = "éÿ"
