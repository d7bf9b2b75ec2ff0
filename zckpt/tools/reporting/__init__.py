"""The steps of zckpt.report: read the values of several checkpoints, gather the data of the page, write the page."""
