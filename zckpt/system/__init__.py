"""The operating system and the interpreter: calls that only Linux has, threads, and the available memory."""
