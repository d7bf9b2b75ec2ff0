"""The functions that users call, a file for each task."""
