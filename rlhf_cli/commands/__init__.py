"""One file per command; each imports what it needs of ``stages`` only when it runs."""
