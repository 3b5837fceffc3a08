"""Every table and figure of the paper, each by one command: `capsnet reproduce NAME`."""
