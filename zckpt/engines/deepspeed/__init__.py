"""DeepSpeed engines. Nothing here imports DeepSpeed: what is needed hangs on the engine."""
