"""The steps of ``zckpt.repair``: ``save`` finds the data files of one save, ``records`` makes the records of the ranks
from their headers, and ``tables`` their digests. ``rebuilt`` makes the files that are lost, compares all data with the
digests that are left, and puts the files in place."""
