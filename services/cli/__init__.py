"""The command line: starts services, one or a whole cluster of them on this machine. The top layer; nothing imports it.

main      parses, calls one of:
serve     one service in this process          (twinflow router | prefill | decode)
up        a cluster in the foreground          (twinflow up)
demo      a cluster, a conversation, a table   (twinflow demo)
admin     a look into a running cluster        (twinflow admin …)
plan      what fits on a device                (twinflow plan)

topology  settings → the processes to start, pure
cluster   starts, watches and stops them       (also what the end-to-end tests use)
process   one child process with its output
"""
