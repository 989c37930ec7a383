"""One optimiser step (on a batch cut into chunks, with cached autograd graphs), and the loop over steps."""
