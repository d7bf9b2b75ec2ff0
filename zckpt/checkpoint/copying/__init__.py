"""The steps of ``zckpt.cp`` and of the uploads of ``copy_to``: plan the files of each rank, write the files, commit."""
