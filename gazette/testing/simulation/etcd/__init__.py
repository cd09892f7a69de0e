"""A fake of etcd, for simulations: one member, in memory, on a clock of the caller's.

``FakeEtcd`` serves the KV, Watch, Lease and Maintenance services at the level of gRPC methods, with etcd's
revisions, errors and order of events. `tests/simulation/test_etcd_conformance.py` runs against it and against
a real etcd. The fake uses no wall clock, no randomness, no sockets and no threads.

Use it so::

    etcd = FakeEtcd(clock)
    etcd.register(server)                        # a grpc.aio.Server, or an in-memory one
    scope.daemon(etcd.run(), name="etcd")        # expires leases; or call etcd.advance() yourself

    etcd.streams[0].hold()                       # this watch delivers nothing until release()
    etcd.streams[0].delay_s = 0.2                # or each event late by 0.2 s
    etcd.watch_delay_s = 0.2                     # or each event of every stream to come
    etcd.elect()                                 # a new leader: leases begin again
    etcd.store.put(request)                      # writes of the simulation's own, without gRPC

Leases end at the first ``advance`` at or after their TTL. A stream that is held across a compaction is
cancelled as compacted on ``release``. Cutting connections is the network's task. Handlers use of the
call's context ``abort``, ``write`` and ``peer`` only.

Where versions of etcd differ, this is the later one: sort options that do not exist are refused (3.5.1
crashes), progress on demand waits for events (3.5.8), and a watch from the compacted revision itself
sees deletions at it (3.5.19). Not implemented, and refused by name: filters of watches, watches from
negative revisions, users and roles.
"""
