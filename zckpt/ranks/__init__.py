"""What the ranks of a job tell each other, and how each notices that another one has died. No file is touched."""
