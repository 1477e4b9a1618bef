"""What the planner says beside what a machine does."""
