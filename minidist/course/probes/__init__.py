"""What each lab calls beside a student's code; a file per lab, and none knows an answer."""
