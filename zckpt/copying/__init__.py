"""The steps of zckpt.cp: what each rank's files are made of, write them, commit."""
