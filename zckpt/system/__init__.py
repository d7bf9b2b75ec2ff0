"""The operating system and the interpreter: Linux's own calls, threads, and how much memory is available."""
