"""What is shown: the page of a study, figures, and progress in the terminal. Nothing here runs or
judges anything."""
