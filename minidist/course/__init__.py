"""The course: labs, a grader for them, and the tests that must find the register of mistakes/.

labs/           a folder per lab: lab.toml: its tasks, their minutes, numbers and hints, and what is
                answered in words; handout.md: the tasks' texts; test_NAME.py: the tests that the
                tasks are; variants.toml: versions of tasks, of which each student has one
lab.py          reads them
inside.py       `task`, `inside`: what a lab's tests are made of
answers.py      compares a value with the package's
blank.py        parts of a source: without bodies of functions, or without the tests
sandbox/        runs a student's code in a separate process, which returns values and nothing else
                limits.py: what it may use, and its user; bubblewrap.py: what it sees;
                untrusted.py: reads and removes the files that it leaves;
                supervisor.py starts what runs there, inside/: the supervisor, the student, values
submissions.py  reads what is handed in, folders and .zip files
grading.py      runs a lab's tests by pytest, `inside` in a sandbox
grader.py       grades a folder: adds up the points
diagnosis.py    names the register's mistake that gives a wrong answer
report.py       writes a grade as text, as JUnit XML, as Gradescope's results.json
folders.py      grades one folder as its lab.txt or a teacher says; a teacher's files
starter.py      what a student begins with: blanked files, a README
grade_all.py    grades the submissions of a class, each in turn in one of several processes
class_report.py writes its results as a text, as CSV
similarity.py   how much code two submissions share
export.py       what a teacher hands out and keeps
property_lab.py the lab in which students write properties that kill the mutants
mutants.py      mistakes that are mutants: the tests of the repository must see them, and say why
"""
