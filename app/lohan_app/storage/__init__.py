"""Who holds what on the drives, for how long, and how much one user may hold."""
