"""Is never imported to its end."""

while True:
    pass
