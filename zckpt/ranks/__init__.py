"""What the ranks of a job tell each other, and how each rank notices that another one has died. No code here opens a
file."""
