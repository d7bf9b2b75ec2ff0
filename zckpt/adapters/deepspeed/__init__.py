"""The adapter for DeepSpeed engines. No module here imports DeepSpeed, because everything that is needed can be reached
from the engine."""
