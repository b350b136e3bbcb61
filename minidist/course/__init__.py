"""The course: labs, a grader for them, and a register of mistakes.

labs/           what is asked: a TOML file per lab, with its tasks, points and hints
lab.py          reads them
blank.py        removes the bodies of functions from a source
overlay.py      minidist with some files replaced: a student's, a blanked or a mutated one
questions/      per lab: what a student's code is asked, and what its answers must be
probes/         per lab: how it is asked; runs with the student's code and judges nothing
sandbox/        runs both in a separate process, which returns arrays and nothing else
                limits.py: what they may use, and their user; environment.py: their environment;
                untrusted.py: reads and removes the untrusted files that they leave; inside/: what
                runs there, a supervisor, and the process that gives up its rights
grader.py       asks, judges, adds up the points
report.py       writes a grade as text, as JUnit XML, as Gradescope's results.json
starter.py      what a student begins with: blanked files, a README, tests
export.py       what a teacher hands out and keeps
property_lab.py the lab in which students write properties that kill the mutants
mistakes/       wrong implementations: which function, what becomes of it, and who must see it
register.py     reads them; edits.py makes them, in the syntax tree
zoo.py          those that are mutants: the tests of the repository must see them
test_batches.py the tests that they meet
mutation_testing.py  runs these, and says what killed each mutant and why
"""
