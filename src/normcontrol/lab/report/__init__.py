"""What people look at: the page, figures, and the live display in the terminal."""
