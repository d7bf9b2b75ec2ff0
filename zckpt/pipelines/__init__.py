"""write, open, restore and validate: each reads top to bottom; the work is done by the layers below."""
