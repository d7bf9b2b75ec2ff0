"""The steps of the uploads of ``copy_to`` and of ``zckpt.cp``: plan the files of each rank, write the files, commit."""
