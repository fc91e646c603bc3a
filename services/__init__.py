"""The processes of a cluster: router, prefill and decode workers, and the command line that starts them."""
