"""Takes along whoever imports it."""

import os

os._exit(0)
