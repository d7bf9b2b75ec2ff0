"""What the ranks of a job tell each other, and how each of them notices that another one has died."""
