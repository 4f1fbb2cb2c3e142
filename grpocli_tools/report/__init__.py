"""`grpocli report` and `grpocli watch`: pages about runs, made from their folders."""
