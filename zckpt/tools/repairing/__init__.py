"""The steps of ``zckpt.repair``. ``checkpoint/listing`` finds the data files of one save (``salvage``), and makes the
records of the ranks from their headers (``rebuild``). ``rebuilt`` makes the files that are lost, compares all data with
the digests that are left, and puts the files in place."""
