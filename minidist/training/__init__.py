"""What `minidist train` does.  Read loop.py; the rest is what a run can ask for.

loop.py          the training loop of synchronous strategies
setup.py         its examples, trainer, optimizer and progress, by the settings
settings.py      what a run is to do
presets.py       the settings of a strategy, by its name
kinds.py         the kinds of data it can learn: of each its model, its words and its outcome
servers.py       asynchronous training: workers and parameter servers
elastic.py       a run that goes on without the ranks that die
translation.py   both directions of a translator at once
"""
