"""The course: labs, a grader for them, and a zoo of mistakes.

overlay.py      minidist with some files replaced: a student's, a blanked or a mutated one
"""
