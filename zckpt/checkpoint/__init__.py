"""The core calls, a file for each task, and a folder for the steps of each."""
