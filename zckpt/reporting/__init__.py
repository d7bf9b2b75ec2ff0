"""The steps of zckpt.report: look at the values of several checkpoints, gather what a page shows, write the page."""
