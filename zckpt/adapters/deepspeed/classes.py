"""Classes of DeepSpeed, known by their names. So no module of DeepSpeed is imported that the engine does not use."""

from __future__ import annotations


def is_a(thing: object, name: str) -> bool:
    """Returns whether an object is an instance of the class of DeepSpeed that has this name."""
    return any(base.__name__ == name and base.__module__.startswith("deepspeed.") for base in type(thing).__mro__)
