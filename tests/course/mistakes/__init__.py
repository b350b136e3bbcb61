"""Mistakes per lab, each with what the grader says to it, and other right ways.

MISTAKES  (task, file, the reference's text, the wrong one, a part of what the grader says)
OTHERS    (task, file, the reference's text, another right one)
NEEDS     {task: the tasks that its text says it builds on}
"""
