"""What takes long to find: leaks (`python -m soak.leaks`) and faults at random moments (`python -m soak`)."""
