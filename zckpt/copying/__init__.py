"""The steps of zckpt.cp: plan what each rank's files are made of, write the files, commit."""
