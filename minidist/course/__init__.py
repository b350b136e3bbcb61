"""The course: labs, a grader for them, and the tests that must find the register of mistakes/.

labs/           a folder per lab: lab.toml: its tasks, their minutes, numbers and hints, and what is
                answered in words; handout.md: the tasks' texts; questions.py: what a student's code
                is asked; probes.py: how it is asked, runs with that code and judges nothing;
                variants.toml: versions of tasks, of which each student has one
lab.py          reads them
question.py     a question and its judge; the right answer is the package's own
answers.py      compares an answer with it
blank.py        removes the bodies of functions from a source
sandbox/        runs both in a separate process, which returns arrays and nothing else
                limits.py: what they may use, and their user; bubblewrap.py: what they see;
                untrusted.py: reads and removes the files that they leave;
                supervisor.py starts what runs there, inside/: the supervisor, the student
submissions.py  reads what is handed in, folders and .zip files
grader.py       asks, judges, adds up the points
folders.py      grades one folder as its lab.txt or a teacher says; a teacher's files
diagnosis.py    names the register's mistake that gives a wrong answer
report.py       writes a grade as text, as JUnit XML, as Gradescope's results.json
starter.py      what a student begins with: blanked files, a README
grade_all.py    grades the submissions of a class, each in turn in one of several processes
report_page.py  writes its results as a text, as CSV, as a page
similarity.py   ranks pairs of submissions by the code that they share
export.py       what a teacher hands out and keeps
property_lab.py the lab in which students write properties that kill the mutants
mutants.py      mistakes that are mutants: the tests of the repository must see them
mutant_tests.py the tests that they meet
mutation_testing.py  runs these, and says what killed each mutant and why
pytest_server.py     what they run in: a fork of a process that has loaded NumPy and pytest
"""
