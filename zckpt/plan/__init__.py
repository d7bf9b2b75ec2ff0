"""Pure functions that plan, as frozen data, what ``transfer`` then carries out. ``inventory`` has the state of a rank
as fragments, and ``lineage`` and ``machines`` have what a checkpoint records of its run and of its machines.

For a write, ``replicas`` and ``together`` divide the work among ranks, ``data_files`` plans the files, ``writes`` plans
the writes that fill them, and ``catalog`` makes the manifest and the index. For a read, ``select`` finds tensors by
name, ``reshard`` finds the bytes that hold their elements, and ``reads`` plans the reads."""
