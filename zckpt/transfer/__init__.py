"""Carries out planned writes (``write``) and reads (``read``) as the steps of a ``pipeline``, with the buffers of
``staging`` and the bounds of ``budget``. ``devices`` copies to and from devices, ``host_memory`` copies within the
memory of the host, and ``memory`` makes and checks tensors. ``stored`` knows the tensors whose values are in a file."""
