"""The steps of zckpt.cp: plan the files of each rank, write the files, commit."""
