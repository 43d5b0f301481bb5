"""How fast normstream is, against itself and against others; see README.md in this folder."""
