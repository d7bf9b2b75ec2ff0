"""The steps of ``zckpt.repair``. ``salvage`` finds the data files of one save. ``digest_tables`` and ``rebuilt``
rebuild what is lost, compare all data with the digests that are left, and put the rebuilt files in place."""
