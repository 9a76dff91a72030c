"""The planner against what engines printed when they started."""
